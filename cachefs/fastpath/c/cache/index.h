/* The index, read-only: two LMDB environments that are read as one, and the validity of their records.
 *
 * environment.py and validity.py have the same rules: the session first, then the durable index; an empty value in the
 * session is a tombstone. Each thread has a `view` of its own, made once and renewed for each request, so that a hit
 * takes no lock and allocates nothing. */
#pragma once

#include <limits.h>
#include <lmdb.h>
#include <stdbool.h>
#include <string.h>

#include "common/shared.h"

#define MAX_KEY (MAX_NAME_BYTES + 8) /* LMDB's */
#define FOREVER UINT64_MAX
#define MAX_CHECKSUMS (CHUNK_BYTES / BLOCK_BYTES)

enum layer { SESSION, DURABLE, LAYERS };

struct index {
    MDB_env *env[LAYERS];
    MDB_dbi tables[LAYERS][TABLES], table_of_tables;
    const struct shared *shared;
    char lock_path[PATH_MAX]; /* the table of readers of the durable index */
    bool is_unregistered;     /* the disk is read-only: the readers of this process are not in the table */
};

struct view {
    const struct index *index;
    MDB_txn *txn[LAYERS];
    MDB_cursor *cursors[LAYERS][TABLES]; /* of the tables that are scanned */
    uint64_t floor, strict_floor, links_floor, run;
    bool open;
    bool damaged; /* something could not be read: what was not found may be there. Python decides (damage.py) */
};

struct extent {
    struct extent_record record;
    uint64_t checksums[MAX_CHECKSUMS];
    uint64_t start; /* where in the file it begins */
};

/* All return 0 or an LMDB error code. `session`, `durable`: as of Environment.place. Without an index every `view_begin`
 * fails, and all requests are passed on. */
int index_open(struct index *index, const char *session, const char *durable, struct shared *shared);
int view_init(struct view *view, const struct index *index);
void view_destroy(struct view *view);
/* Opened while the disk was read-only, and the disk can be written again: this process must be replaced. */
bool index_is_outdated(const struct index *index);

/* A snapshot of the index, until `view_end`. Keep it short: LMDB cannot reuse pages that a reader may see. */
int view_begin(struct view *view);
void view_end(struct view *view);

/* The value of a key; its bytes are valid until `view_end`. */
bool view_get(struct view *view, enum table table, const void *key, size_t key_length, MDB_val *value);
/* The same, under a number and a name. */
bool view_get_named(struct view *view, enum table table, uint64_t number, const char *name, size_t length, MDB_val *value);
bool view_inode(struct view *view, uint64_t inode, struct inode_record *out);
bool view_dentry(struct view *view, uint64_t parent, const char *name, size_t length, struct dentry_record *out);
/* The extent that holds the byte at `offset`: no extent lies within another, so it is the last one that begins there or
 * before. */
bool view_extent(struct view *view, uint64_t inode, uint64_t offset, struct extent *out);
/* Are all bytes from `start` to `end` in the blob? */
bool view_has_range(struct view *view, uint64_t inode, uint64_t version, uint64_t start, uint64_t end);
/* The start of the first extent that begins in [from, to); `to` if there is none. */
uint64_t view_next_extent(struct view *view, uint64_t inode, uint64_t from, uint64_t to);

/* All keys with a prefix, in order, from `start` on. One scan of a table at a time. */
struct scan {
    struct view *view;
    struct scan_position {
        MDB_cursor *cursor;
        MDB_val key, value;
        bool found;
    } at[LAYERS];
    uint64_t prefix; /* as in a key */
};
bool scan_begin(struct scan *scan, struct view *view, enum table table, uint64_t prefix, const void *start, size_t length);
bool scan_next(struct scan *scan, MDB_val *key, MDB_val *value);

/* The path of an inode beneath the source, without a slash at either end, zero-terminated. False: none is known. */
bool view_path(struct view *view, uint64_t inode, char *path, size_t size);

/* Validity: validity.py has the same functions and the reasons. */
bool is_pinned(const struct view *view, const struct inode_record *record);
uint64_t remaining_ns(const struct view *view, const struct inode_record *record);
bool entry_holds(const struct view *view, const struct inode_record *parent, const struct dentry_record *dentry);
bool knows_absent(const struct view *view, const struct inode_record *parent, const struct dentry_record *dentry);
bool is_immutable(const struct view *view, const struct inode_record *record);
/* Does a read-only open make the file immutable, as far as the index knows? Python makes the final decision. */
bool is_immutable_on_open(const struct inode_record *record);

bool is_small(const struct shared *shared, uint64_t size);
/* The unit that holds the byte at `offset`: (offset, length). A whole small file, or a chunk. */
void unit_of(const struct shared *shared, uint64_t size, uint64_t offset, uint64_t *start, uint32_t *length);

/* Blocks of so many bytes of payload: each has a checksum. */
static inline uint32_t block_count(uint32_t length)
{
    return (uint32_t)((length + (uint64_t)BLOCK_BYTES - 1) / BLOCK_BYTES);
}

static inline uint64_t big_endian(uint64_t number)
{
    return __builtin_bswap64(number);
}

/* The second number of a key that has one. */
static inline uint64_t second_number(const MDB_val *key)
{
    uint64_t number;
    memcpy(&number, (const char *)key->mv_data + sizeof number, sizeof number);
    return big_endian(number);
}
