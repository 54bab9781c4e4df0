#include "cache/index.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/lost_index.h"
#include "common/assertion.h"
#include "common/clock.h"

#define MAX_DEPTH 4096

static const char *const table_names[TABLES] = {TABLE_NAMES};
static const enum table scanned[] = {LINKS, LISTING, EXTENTS};

/* NULL if it is none. */
static const char *place_path(const char *place, uintmax_t *device, uintmax_t *number)
{
    int length = 0;
    return sscanf(place, "%ju:%ju:%n", device, number, &length) == 2 && length ? place + length : NULL;
}

/* Is this the file that the daemon has open? A copy in its place, perhaps of an older state, gets none of its commits. */
static int check_file(MDB_env *env, uintmax_t device, uintmax_t number)
{
    struct stat now;
    int fd, error = mdb_env_get_fd(env, &fd);
    if (error || fstat(fd, &now))
        return error ? error : errno;
    return now.st_dev == device && now.st_ino == number ? 0 : ESTALE;
}

/* `place`: as of Environment.place. After an error nothing is closed: the process ends, or goes on without an index. */
static int open_environment(MDB_env **env, const char *place, MDB_dbi *tables, MDB_dbi *table_of_tables)
{
    MDB_txn *txn;
    uintmax_t device, number;
    const char *path = place_path(place, &device, &number);
    int error = path ? mdb_env_create(env) : EINVAL;
    if (error || (error = mdb_env_set_mapsize(*env, MAP_BYTES)) || (error = mdb_env_set_maxdbs(*env, TABLES)) ||
        (error = mdb_env_open(*env, path, MDB_RDONLY | MDB_NOTLS | MDB_NORDAHEAD, 0600)) ||
        (error = check_file(*env, device, number)) || (error = mdb_txn_begin(*env, NULL, MDB_RDONLY, &txn)))
        return error;
    for (int table = 0; table < TABLES; table++)
        if ((error = mdb_dbi_open(txn, table_names[table], 0, &tables[table])))
            return error;
    if ((error = mdb_dbi_open(txn, NULL, 0, table_of_tables)))
        return error;
    return mdb_txn_commit(txn);
}

/* False if the newest meta page is damaged and refers to no tables: LMDB would abort the process when it looks for one. */
static bool has_tables(const struct index *index, MDB_txn *txn)
{
    MDB_stat tables;
    return !mdb_stat(txn, index->table_of_tables, &tables) && tables.ms_entries;
}

/* LMDB reads an index without a table of readers where it cannot write one. That is safe as long as no commit can be made. */
static bool is_read_only(const struct index *index)
{
    int fd = open(index->lock_path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return errno == EROFS;
    close(fd); /* LMDB has no lock on it yet, which this would release */
    return false;
}

int index_open(struct index *index, const char *session, const char *durable, struct shared *shared)
{
    *index = (struct index){.shared = shared};
    uintmax_t unused;
    const char *path = place_path(durable, &unused, &unused);
    snprintf(index->lock_path, sizeof index->lock_path, "%s/lock.mdb", path ? path : "");
    index->is_unregistered = is_read_only(index);
    int error = lost_index_watch(shared) ? 0 : errno;
    if (!error)
        error = open_environment(&index->env[DURABLE], durable, index->tables[DURABLE], &index->table_of_tables);
    if (!error)
        error = open_environment(&index->env[SESSION], session, index->tables[SESSION], &index->table_of_tables);
    if (error)
        index->env[SESSION] = index->env[DURABLE] = NULL;
    return error;
}

bool index_is_outdated(const struct index *index)
{
    return index->is_unregistered && !is_read_only(index);
}

int view_init(struct view *view, const struct index *index)
{
    *view = (struct view){.index = index};
    int error = index->env[SESSION] && index->env[DURABLE] ? 0 : EIO;
    for (int layer = 0; !error && layer < LAYERS; layer++) {
        error = mdb_txn_begin(index->env[layer], NULL, MDB_RDONLY, &view->txn[layer]);
        for (size_t i = 0; !error && i < sizeof scanned / sizeof *scanned; i++) {
            enum table table = scanned[i];
            error = mdb_cursor_open(view->txn[layer], index->tables[layer][table], &view->cursors[layer][table]);
        }
    }
    if (error) {
        view_destroy(view);
        return error;
    }
    view->open = true;
    view_end(view);
    return 0;
}

void view_destroy(struct view *view)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int table = 0; table < TABLES; table++)
            if (view->cursors[layer][table])
                mdb_cursor_close(view->cursors[layer][table]);
        if (view->txn[layer])
            mdb_txn_abort(view->txn[layer]);
    }
    *view = (struct view){0};
}

int view_begin(struct view *view)
{
    if (view->open)
        return 0;
    if (!view->txn[SESSION] || !view->txn[DURABLE] || index_is_lost()) /* it could not be opened, or is lost */
        return EIO;
    const struct shared *shared = view->index->shared;
    view->floor = shared->floor;
    view->strict_floor = shared->strict_floor;
    view->links_floor = shared->links_floor ? shared->links_floor : view->strict_floor;
    view->run = shared->run;
    /* The session first: a record is in the durable index before it leaves the session. */
    int error = mdb_txn_renew(view->txn[SESSION]);
    if (error)
        return error;
    if ((error = mdb_txn_renew(view->txn[DURABLE]))) {
        mdb_txn_reset(view->txn[SESSION]);
        return error;
    }
    if (!has_tables(view->index, view->txn[DURABLE])) {
        mdb_txn_reset(view->txn[SESSION]);
        mdb_txn_reset(view->txn[DURABLE]);
        return MDB_CORRUPTED;
    }
    view->open = true;
    view->damaged = false;
    return 0;
}

void view_end(struct view *view)
{
    if (!view->open)
        return;
    mdb_txn_reset(view->txn[SESSION]);
    mdb_txn_reset(view->txn[DURABLE]);
    view->open = false;
}

static bool was_found(struct view *view, int error)
{
    bool lost = index_is_lost();
    view->damaged |= lost || (error && error != MDB_NOTFOUND);
    return !error && !lost;
}

/* Copies a value. False: the index was lost meanwhile. */
static bool copied(struct view *view, void *out, const MDB_val *value)
{
    memcpy(out, value->mv_data, value->mv_size);
    return was_found(view, 0);
}

bool view_get(struct view *view, enum table table, const void *key, size_t key_length, MDB_val *value)
{
    MDB_val k = {key_length, (void *)key};
    if (key_length > MAX_KEY)
        return false;
    if (was_found(view, mdb_get(view->txn[SESSION], view->index->tables[SESSION][table], &k, value)))
        return value->mv_size != 0;
    return was_found(view, mdb_get(view->txn[DURABLE], view->index->tables[DURABLE][table], &k, value)) && value->mv_size != 0;
}

bool view_get_named(struct view *view, enum table table, uint64_t number, const char *name, size_t length, MDB_val *value)
{
    uint8_t key[MAX_KEY];
    number = big_endian(number);
    if (sizeof number + length > sizeof key)
        return false;
    memcpy(key, &number, sizeof number);
    if (length)
        memcpy(key + sizeof number, name, length);
    return view_get(view, table, key, sizeof number + length, value);
}

bool view_inode(struct view *view, uint64_t inode, struct inode_record *out)
{
    uint64_t key = big_endian(inode);
    MDB_val value;
    if (!view_get(view, INODES, &key, sizeof key, &value) || value.mv_size != sizeof *out)
        return false;
    return copied(view, out, &value) && !(out->flags & ~KNOWN_FLAGS);
}

bool view_dentry(struct view *view, uint64_t parent, const char *name, size_t length, struct dentry_record *out)
{
    MDB_val value;
    if (!view_get_named(view, DENTRIES, parent, name, length, &value))
        return false;
    if (value.mv_size != sizeof *out || !copied(view, out, &value) || (out->flags & ~KNOWN_FLAGS))
        *out = (struct dentry_record){.inode = UINT64_MAX}; /* the name exists, and nothing else is known: not absent */
    return true;
}

static bool parse_extent(struct view *view, const MDB_val *value, struct extent *out)
{
    if (value->mv_size < sizeof out->record || value->mv_size > offsetof(struct extent, start))
        return false;
    return copied(view, out, value) && !(out->record.flags & ~KNOWN_FLAGS) &&
           value->mv_size == sizeof out->record + block_count(out->record.length) * sizeof(uint64_t);
}

/* The cursor of the extents, renewed for this transaction. */
static MDB_cursor *extents_of(struct view *view)
{
    MDB_cursor *cursor = view->cursors[DURABLE][EXTENTS];
    return mdb_cursor_renew(view->txn[DURABLE], cursor) ? NULL : cursor;
}

bool view_extent(struct view *view, uint64_t inode, uint64_t offset, struct extent *out)
{
    uint64_t key[2] = {big_endian(inode), big_endian(offset)};
    MDB_val k = {sizeof key, key}, value;
    out->start = offset;
    if (!mdb_get(view->txn[DURABLE], view->index->tables[DURABLE][EXTENTS], &k, &value))
        return parse_extent(view, &value, out) && out->record.length;
    MDB_cursor *cursor = offset ? extents_of(view) : NULL;
    if (!cursor)
        return false;
    MDB_cursor_op back = mdb_cursor_get(cursor, &k, &value, MDB_SET_RANGE) ? MDB_LAST : MDB_PREV;
    if (mdb_cursor_get(cursor, &k, &value, back) || k.mv_size != sizeof key || memcmp(k.mv_data, key, sizeof *key))
        return false;
    out->start = second_number(&k);
    return parse_extent(view, &value, out) && offset - out->start < out->record.length;
}

bool view_has_range(struct view *view, uint64_t inode, uint64_t version, uint64_t start, uint64_t end)
{
    struct extent extent;
    while (start < end && view_extent(view, inode, start, &extent) && extent.record.version == version)
        start = extent.start + extent.record.length;
    return start >= end;
}

uint64_t view_next_extent(struct view *view, uint64_t inode, uint64_t from, uint64_t to)
{
    uint64_t key[2] = {big_endian(inode), big_endian(from)};
    MDB_val k = {sizeof key, key}, value;
    MDB_cursor *cursor = extents_of(view);
    if (!cursor || mdb_cursor_get(cursor, &k, &value, MDB_SET_RANGE) || k.mv_size != sizeof key ||
        memcmp(k.mv_data, key, sizeof *key))
        return to;
    uint64_t start = second_number(&k);
    return start < to ? start : to;
}

static void scan_move(const struct scan *scan, struct scan_position *at, MDB_cursor_op where)
{
    at->found = was_found(scan->view, mdb_cursor_get(at->cursor, &at->key, &at->value, where)) &&
                at->key.mv_size >= sizeof scan->prefix &&
                !memcmp(at->key.mv_data, &scan->prefix, sizeof scan->prefix);
}

bool scan_begin(struct scan *scan, struct view *view, enum table table, uint64_t prefix, const void *start, size_t length)
{
    *scan = (struct scan){.view = view, .prefix = big_endian(prefix)};
    for (int layer = 0; layer < LAYERS; layer++) {
        struct scan_position *at = &scan->at[layer];
        at->cursor = view->cursors[layer][table];
        ASSERT(at->cursor);
        if (mdb_cursor_renew(view->txn[layer], at->cursor))
            return false;
        at->key = start ? (MDB_val){length, (void *)start} : (MDB_val){sizeof scan->prefix, &scan->prefix};
        scan_move(scan, at, MDB_SET_RANGE);
    }
    return true;
}

static int compare_keys(const MDB_val *a, const MDB_val *b)
{
    size_t shorter = a->mv_size < b->mv_size ? a->mv_size : b->mv_size;
    int order = memcmp(a->mv_data, b->mv_data, shorter);
    return order ? order : (a->mv_size > b->mv_size) - (a->mv_size < b->mv_size);
}

bool scan_next(struct scan *scan, MDB_val *key, MDB_val *value)
{
    struct scan_position *session = &scan->at[SESSION], *durable = &scan->at[DURABLE];
    while (session->found || durable->found) {
        int order = !durable->found ? -1 : !session->found ? 1 : compare_keys(&session->key, &durable->key);
        *key = order <= 0 ? session->key : durable->key;
        *value = order <= 0 ? session->value : durable->value;
        if (order <= 0)
            scan_move(scan, session, MDB_NEXT);
        if (order >= 0)
            scan_move(scan, durable, MDB_NEXT);
        if (value->mv_size) /* else a tombstone */
            return true;
    }
    return false;
}

bool view_path(struct view *view, uint64_t inode, char *path, size_t size)
{
    ASSERT(size && view->open);
    size_t at = size - 1; /* the path is built from its end */
    path[at] = 0;
    for (int depth = 0; inode != ROOT_INODE; depth++) {
        struct scan scan;
        MDB_val key, value;
        if (depth > MAX_DEPTH || !scan_begin(&scan, view, LINKS, inode, NULL, 0) || !scan_next(&scan, &key, &value) ||
            key.mv_size <= 16)
            return false;
        size_t length = key.mv_size - 16;
        if (length + 1 > at)
            return false;
        if (path[at])
            path[--at] = '/';
        at -= length;
        memcpy(path + at, (char *)key.mv_data + 16, length);
        inode = second_number(&key);
    }
    memmove(path, path + at, size - at);
    return true;
}

bool is_pinned(const struct view *view, const struct inode_record *record)
{
    uint32_t mount = view->index->shared->flags;
    return (record->flags & PINNED) && (mount & PINS_FILES) &&
           ((mount & PINS_EVERYTHING) || (record->flags & IMMUTABLE) || S_ISDIR(record->mode));
}

bool is_immutable_on_open(const struct inode_record *record)
{
    return (record->flags & (IMMUTABLE_ON_OPEN | IMMUTABLE | WRITTEN | STALE | UNLINKED)) == IMMUTABLE_ON_OPEN;
}

/* Was it compared with the source recently enough? validity.py has the same rule. */
static bool counts(const struct view *view, const struct inode_record *record)
{
    if (record->validated_run < view->floor || (record->device && record->validated_run < view->strict_floor))
        return false;
    return record->nlink <= 1 || S_ISDIR(record->mode) || record->validated_run >= view->links_floor;
}

uint64_t remaining_ns(const struct view *view, const struct inode_record *record)
{
    if (record->flags & STALE)
        return 0;
    if (record->flags & UNLINKED)
        return FOREVER;
    if (is_pinned(view, record)) {
        if (!counts(view, record))
            return 0;
        if (!(record->flags & UNSETTLED))
            return FOREVER;
        if (record->validated_run != view->run)
            return 0;
    }
    uint64_t now = monotonic_ns();
    return record->expires_ns > now ? record->expires_ns - now : 0;
}

bool entry_holds(const struct view *view, const struct inode_record *parent, const struct dentry_record *dentry)
{
    return (dentry->flags & PINNED) && is_pinned(view, parent) && dentry->validated_run >= parent->entries_valid_from &&
           counts(view, parent) && !(parent->flags & STALE);
}

bool knows_absent(const struct view *view, const struct inode_record *parent, const struct dentry_record *dentry)
{
    return (view->index->shared->flags & PINS_EVERYTHING) && !dentry->inode && remaining_ns(view, parent) &&
           entry_holds(view, parent, dentry);
}

bool is_immutable(const struct view *view, const struct inode_record *record)
{
    return S_ISREG(record->mode) && is_pinned(view, record) &&
           ((record->flags & IMMUTABLE) || (view->index->shared->flags & PINS_EVERYTHING));
}

bool is_small(const struct shared *shared, uint64_t size)
{
    return size <= (shared->small_file_bytes < CHUNK_BYTES ? shared->small_file_bytes : CHUNK_BYTES);
}

void unit_of(const struct shared *shared, uint64_t size, uint64_t offset, uint64_t *start, uint32_t *length)
{
    *start = is_small(shared, size) ? 0 : offset / CHUNK_BYTES * CHUNK_BYTES;
    uint64_t rest = size - *start;
    *length = (uint32_t)(rest < CHUNK_BYTES ? rest : CHUNK_BYTES);
}
