/* The fast path's rules for a test in Python: over an index and shared memory that Python has made. */
#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "appender/record.h"
#include "cache/age.h"
#include "cache/blob.h"
#include "common/buffer.h"
#include "hits/answer.h"
#include "misses/source.h"
#include "misses/window.h"

static const char *const table_names[TABLES] = {
    "meta", "aliases", "inodes", "dentries", "links", "listing", "symlinks", "xattrs", "extents",
};
static struct index index_;
static struct view view;
static int given_blob;
struct shared *shared;
static struct fetch_table table;
static struct fetch *fetches[64];
static size_t fetch_count;
static struct counters counters;

/* --- time ---------------------------------------------------------------------------------------------------------- */

static int64_t monotonic;

void set_clock(int64_t monotonic_)
{
    monotonic = monotonic_;
}

int clock_gettime(clockid_t, struct timespec *out)
{
    *out = (struct timespec){.tv_sec = monotonic / 1000000000, .tv_nsec = monotonic % 1000000000};
    return 0;
}

/* --- disks that read in parts, or not at all -------------------------------------------------------------------------- */

static struct {
    size_t most; /* bytes that a pread gives; 0: all */
    int error, times; /* so many fail first */
    bool stays_direct; /* O_DIRECT cannot be taken back */
    unsigned direct_reads;
} disk;

void set_disk(size_t most, int error, int times, bool stays_direct)
{
    disk.most = most, disk.error = error, disk.times = times, disk.stays_direct = stays_direct, disk.direct_reads = 0;
}

unsigned direct_reads(void)
{
    return disk.direct_reads;
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset)
{
    disk.direct_reads += (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (disk.times > 0) {
        disk.times--;
        errno = disk.error;
        return -1;
    }
    ssize_t got = syscall(SYS_pread64, fd, buffer, length, offset);
    return disk.most && got > (ssize_t)disk.most ? (ssize_t)disk.most : got;
}

int fcntl(int fd, int command, ...)
{
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    if (command == F_SETFL && disk.stays_direct && !(argument & O_DIRECT)) {
        errno = EPERM;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

/* --- the index ----------------------------------------------------------------------------------------------------- */

bool attach(int fd)
{
    shared = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    index_.shared = shared;
    return shared != MAP_FAILED;
}

/* Without LMDB's lock file: Python has the same environments open, in the same process. */
static int open_environment(MDB_env **env, const char *path, MDB_dbi *tables)
{
    MDB_txn *txn;
    int error = mdb_env_create(env);
    if (!error)
        error = mdb_env_set_mapsize(*env, (size_t)1 << 30);
    if (!error)
        error = mdb_env_set_maxdbs(*env, TABLES);
    if (!error)
        error = mdb_env_open(*env, path, MDB_RDONLY | MDB_NOTLS | MDB_NOLOCK, 0600);
    if (!error)
        error = mdb_txn_begin(*env, NULL, MDB_RDONLY, &txn);
    for (int each = 0; !error && each < TABLES; each++)
        error = mdb_dbi_open(txn, table_names[each], 0, &tables[each]);
    return error ? error : mdb_txn_commit(txn);
}

int open_index(const char *session, const char *durable)
{
    int error = open_environment(&index_.env[SESSION], session, index_.tables[SESSION]);
    if (!error)
        error = open_environment(&index_.env[DURABLE], durable, index_.tables[DURABLE]);
    return error ? error : view_init(&view, &index_);
}

void close_index(void)
{
    view_destroy(&view);
    mdb_env_close(index_.env[SESSION]);
    mdb_env_close(index_.env[DURABLE]);
}

/* For rules that need no index. */
void set_floors(void)
{
    view.index = &index_;
    view.floor = shared->floor;
    view.strict_floor = shared->strict_floor;
    view.links_floor = shared->links_floor ? shared->links_floor : shared->strict_floor;
    view.run = shared->run;
}

struct view *begin(void)
{
    return view_begin(&view) ? NULL : &view;
}

struct view *now(void)
{
    return &view;
}

bool path_of(uint64_t inode, char *path, size_t size)
{
    return view_path(&view, inode, path, size);
}

/* --- age ----------------------------------------------------------------------------------------------------------- */

/* When the pages are dropped; 0: the data must not be given out. */
uint64_t note_young(uint64_t inode, const struct inode_record *record)
{
    uint64_t place = shared->young.written;
    if (!young_note(shared, inode, record))
        return 0;
    const struct young_file *entry = &shared->young.entries[place % YOUNG_ENTRIES];
    return entry->inode == inode && shared->young.written == place + 1 ? entry->due_ns : 0;
}

/* --- windows ------------------------------------------------------------------------------------------------------- */

void clear_fetches(void)
{
    while (fetch_count) {
        struct fetch *fetch = fetches[--fetch_count];
        remove_from_table_locked(&table, fetch);
        free(fetch);
    }
}

bool add_fetch(const struct inode_record *record, uint64_t inode, uint64_t offset, uint32_t length, bool cached)
{
    struct fetch *fetch = fetch_count < sizeof fetches / sizeof *fetches ? fetch_new(record, inode, "path") : NULL;
    if (!fetch)
        return false;
    fetch->offset = offset;
    fetch->length = length;
    fetch->cached = cached;
    add_to_table_locked(&table, fetch);
    fetches[fetch_count++] = fetch;
    return true;
}

void window(uint64_t inode, uint64_t version, uint64_t size, uint64_t start, uint64_t end, uint64_t out[3])
{
    struct window found = window_of_locked(&(struct known){&table, &view, inode, version}, size, start, end);
    out[0] = found.start, out[1] = found.end, out[2] = found.streams;
}

void next_window(uint64_t inode, uint64_t version, uint64_t size, uint64_t end, uint64_t out[3])
{
    struct window found = window_after_locked(&(struct known){&table, &view, inode, version}, size, end);
    out[0] = found.start, out[1] = found.end, out[2] = found.streams;
}

/* --- records, blob, source ------------------------------------------------------------------------------------------ */

/* Writes the record to the blob, and what the index is to know of it to `out`: its length, 0 on an error. */
size_t write_record(int blob, const struct inode_record *record, uint64_t inode, uint64_t offset, uint8_t *payload,
                    uint32_t length, uint64_t at, struct extent *out)
{
    struct blob_writer writer;
    struct fetch *fetch = fetch_new(record, inode, "path");
    if (!fetch || !blob_writer_open(&writer, blob))
        return 0;
    fetch->offset = offset;
    fetch->length = length;
    fetch->payload = payload;
    memset(out, 0, sizeof *out);
    bool good = put_record(&writer, fetch, at, shared->seed, out) && blob_writer_flush(&writer);
    blob_writer_trim(&writer);
    if (writer.direct != blob)
        close(writer.direct);
    munmap(writer.buffer, 2u << 20);
    free(fetch);
    return good ? sizeof out->record + block_count(length) * sizeof(uint64_t) : 0;
}

/* Whether the bytes are what was written. */
bool read_blob(int fd, const uint8_t *value, size_t value_length, uint32_t start, uint32_t length, void *out)
{
    struct blob blob;
    struct extent extent = {0};
    if (value_length > offsetof(struct extent, start))
        return false;
    blob_open(&blob, fd, shared->seed);
    memcpy(&extent, value, value_length);
    void *scratch = aligned_alloc(DIRECT_ALIGNMENT, (SCRATCH_BYTES((size_t)length) + 4095) / 4096 * 4096);
    const void *data = scratch ? blob_read(&blob, &extent, start, length, scratch) : NULL;
    if (data)
        memcpy(out, data, length);
    free(scratch);
    if (blob.fd != fd)
        close(blob.fd);
    return data;
}

bool read_source(int root, const char *path, const struct inode_record *record, uint64_t offset, uint32_t length, void *out)
{
    uint8_t *data = source_read(shared, root, path, record, offset, length, 0, 0, &counters);
    if (data) {
        memcpy(out, data, length);
        source_free(data, length);
    }
    return data;
}

/* --- answers to the kernel ------------------------------------------------------------------------------------------ */

static struct fastpath fastpath;
static struct worker worker;

/* Over the index that is open. */
bool open_answers(int blob)
{
    uint8_t *scratch = buffer_memory(2 * QUICK_BYTES);
    fastpath = (struct fastpath){.shared = shared, .index = index_, .daemon = {.socket = -1}};
    fastpath.device = memfd_create("device", MFD_CLOEXEC);
    fastpath.speculative_read.scratch = scratch + QUICK_BYTES;
    blob_open(&fastpath.blob, blob, shared->seed);
    given_blob = blob;
    return scratch && fastpath.device >= 0 && !worker_init(&worker, &fastpath, &counters, scratch);
}

void close_answers(void)
{
    view_destroy(&worker.view);
    close(fastpath.device);
    if (fastpath.blob.fd != given_blob)
        close(fastpath.blob.fd);
}

/* Of a request: its answer's length, 0 where it has none; -1: it is passed on; -2: no kernel sends that. `guessing`: this
 * thread is the leader, and may read speculatively. */
ssize_t ask(void *message, size_t length, void *reply, size_t room, bool guessing)
{
    struct request request;
    if (!request_parse(message, length, &request))
        return -2;
    if (ftruncate(fastpath.device, 0) || lseek(fastpath.device, 0, SEEK_SET))
        return -2;
    if (guessing)
        leader_become(&worker);
    enum outcome outcome = answer_request(&worker, &request);
    view_end(&worker.view);
    if (guessing && outcome == ANSWERED)
        speculative_read_next(&fastpath.speculative_read, &worker.view, &fastpath.blob);
    leader_resign(&worker);
    return outcome == ANSWERED ? pread(fastpath.device, reply, room, 0) : -1;
}

/* Bit 0: doing it twice would be seen. 1: it sets what it finds. 2: it has no answer. 3: it may be interrupted. */
int kind_of_request(void *message, size_t length)
{
    struct request request;
    if (!request_parse(message, length, &request))
        return -1;
    uint32_t opcode = request.header->opcode;
    return request_changes(&request) | request_is(opcode, OVERWRITES) << 1 | request_is(opcode, FORGETS) << 2 |
           request_is(opcode, INTERRUPTIBLE) << 3;
}
