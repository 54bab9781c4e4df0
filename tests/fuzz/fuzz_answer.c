/* Answers from an index of any content, damaged or made up. libFuzzer.
 *
 * The input says what records lie in the two environments, and what the kernel asks. Whatever that is: no step outside
 * memory, an answer that the kernel can take apart, READs of as many bytes as the file is said to have, and bytes only
 * where the checksums of the record are those of the blob. */
#include <fcntl.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/buffer.h"
#include "hits/answer.h"

#define SEED 77
#define BLOB_BYTES (3u << 20)
#define MOST_RECORDS 24
#define USUAL_BYTES 5000
#define NAMES 4
#define CHECK(condition)                                           \
    do {                                                           \
        if (!(condition)) {                                        \
            fprintf(stderr, "%s does not hold\n", #condition);     \
            abort();                                               \
        }                                                          \
    } while (0)

static const char *const table_names[TABLES] = {
    "meta", "aliases", "inodes", "dentries", "links", "listing", "symlinks", "xattrs", "extents",
};
static struct shared shared;
static struct fastpath fastpath;
static struct worker worker;
static struct counters counters;
static MDB_env *environments[2];
static MDB_dbi tables[2][TABLES];
static uint8_t content[BLOB_BYTES];

static void make_environment(const char *path, int which)
{
    CHECK(!mkdir(path, 0700));
    MDB_txn *txn;
    CHECK(!mdb_env_create(&environments[which]) && !mdb_env_set_mapsize(environments[which], 64u << 20) &&
          !mdb_env_set_maxdbs(environments[which], TABLES) &&
          !mdb_env_open(environments[which], path, MDB_NOSYNC | MDB_WRITEMAP, 0600) &&
          !mdb_txn_begin(environments[which], NULL, 0, &txn));
    for (int table = 0; table < TABLES; table++)
        CHECK(!mdb_dbi_open(txn, table_names[table], MDB_CREATE, &tables[which][table]));
    CHECK(!mdb_txn_commit(txn));
}

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments;
    char directory[] = "/dev/shm/cachefs-fuzz-XXXXXX", session[64], durable[64];
    CHECK(mkdtemp(directory));
    snprintf(session, sizeof session, "%s/session", directory);
    snprintf(durable, sizeof durable, "%s/durable", directory);
    make_environment(session, 0);
    make_environment(durable, 1);
    /* LMDB must not be opened twice by a process: the fast path's index is these environments. */
    fastpath.index = (struct index){.env = {environments[0], environments[1]}, .shared = &shared};
    memcpy(fastpath.index.tables, tables, sizeof tables);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", directory); /* they stay open */
    CHECK(!system(command));

    uint32_t random = 1;
    for (uint32_t i = 0; i < BLOB_BYTES; i++)
        content[i] = (uint8_t)((random = random * 1664525 + 1013904223) >> 24);
    int blob = memfd_create("blob", 0);
    CHECK(write(blob, content, BLOB_BYTES) == BLOB_BYTES);
    blob_open(&fastpath.blob, blob, SEED);
    fastpath.shared = &shared;
    fastpath.device = memfd_create("device", 0);
    fastpath.daemon.socket = -1;
    uint8_t *scratch = buffer_memory(2 * QUICK_BYTES);
    fastpath.speculative_read.scratch = scratch + QUICK_BYTES;
    CHECK(!worker_init(&worker, &fastpath, &counters, scratch));
    worker.log = &shared.accesses[0];
    return 0;
}

/* --- the input, byte by byte --------------------------------------------------------------------------------------- */

struct input {
    const uint8_t *at, *end;
};

static uint8_t byte(struct input *input)
{
    return input->at < input->end ? *input->at++ : 0;
}

static uint64_t number(struct input *input, int bytes)
{
    uint64_t value = 0;
    while (bytes--)
        value = value << 8 | byte(input);
    return value;
}

static uint64_t inode(struct input *input)
{
    return byte(input) % 6;
}

static size_t name(struct input *input, char *out)
{
    uint8_t which = byte(input);
    if (which < 250) {
        snprintf(out, 8, "name%d", which % NAMES);
        return strlen(out);
    }
    size_t length = which == 255 ? 300 : which - 250;
    memset(out, 'x', length);
    out[length] = 0;
    return length;
}

static void raw(struct input *input, void *out, size_t length)
{
    for (size_t i = 0; i < length; i++)
        ((uint8_t *)out)[i] = byte(input);
}

/* What is 0 in the input is as it usually is, here and below. */
static uint64_t length_of(struct input *input)
{
    return byte(input) ? number(input, 3) : USUAL_BYTES;
}

static void make_inode(struct input *input, struct inode_record *record)
{
    *record = (struct inode_record){.flags = byte(input) ^ (PINNED | IMMUTABLE | LISTED)};
    record->mode = byte(input) & 1 ? S_IFDIR | 0755 : S_IFREG | 0644;
    record->size = length_of(input);
    record->version = byte(input) & 3;
    record->validated_run = record->entries_valid_from = 2;
    if (byte(input) == 255)
        raw(input, record, sizeof *record);
}

static void make_extent(struct input *input, struct extent *extent)
{
    *extent = (struct extent){.record = {.flags = PINNED, .length = (uint32_t)length_of(input)}};
    extent->record.version = byte(input) & 3;
    extent->record.blob_offset = number(input, 3);
    uint64_t end = extent->record.blob_offset + extent->record.length;
    if (end <= BLOB_BYTES && extent->record.length <= CHUNK_BYTES)
        for (uint32_t at = 0, block = 0; at < extent->record.length; at += BLOCK_BYTES, block++) {
            uint32_t rest = extent->record.length - at;
            extent->checksums[block] =
                checksum(content + extent->record.blob_offset + at, rest < BLOCK_BYTES ? rest : BLOCK_BYTES, SEED);
        }
    uint8_t kind = byte(input);
    if (kind == 255)
        raw(input, extent, 64);
    else if (kind)
        extent->checksums[kind % MAX_CHECKSUMS]++; /* the blob has been damaged */
}

static void put_record(struct input *input, MDB_txn *txns[2])
{
    uint8_t key[512], value[1024], which = byte(input), sizes = byte(input);
    char text[304];
    int where = which & 1;
    enum table table = (which >> 1) % TABLES;
    uint64_t head = big_endian(inode(input));
    memcpy(key, &head, sizeof head);
    size_t key_length = sizeof head, length = 0;
    struct extent extent;
    switch (table) {
    case META:
    case ALIASES:
    case INODES:
        make_inode(input, (struct inode_record *)value);
        length = sizeof(struct inode_record);
        break;
    case DENTRIES: {
        key_length += name(input, (char *)key + 8);
        struct dentry_record dentry = {byte(input), 0, inode(input), 2, FIRST_POSITION + byte(input) % 4};
        memcpy(value, &dentry, length = sizeof dentry);
        break;
    }
    case LINKS:
        head = big_endian(inode(input));
        memcpy(key + 8, &head, sizeof head);
        key_length += sizeof head + name(input, (char *)key + 16);
        memset(value, 1, length = 4);
        break;
    case LISTING:
        head = big_endian(FIRST_POSITION + byte(input) % 4);
        memcpy(key + 8, &head, sizeof head);
        key_length += sizeof head;
        memset(value, 1, 4);
        length = 4 + name(input, text);
        memcpy(value + 4, text, length - 4);
        break;
    case SYMLINKS:
    case XATTRS:
        if (table == XATTRS)
            key_length += name(input, (char *)key + 8);
        memset(value, 0, 16);
        value[8] = byte(input) & 3;
        length = 16 + byte(input);
        raw(input, value + 16, length - 16);
        break;
    default:
        head = big_endian(number(input, 3));
        memcpy(key + 8, &head, sizeof head);
        key_length += sizeof head;
        make_extent(input, &extent);
        length = sizeof extent.record + block_count(extent.record.length) * sizeof(uint64_t);
        if (length > offsetof(struct extent, start))
            length = offsetof(struct extent, start);
        memcpy(value, &extent, length);
    }
    if (sizes == 255)
        length = number(input, 2) % sizeof value;
    else if (sizes == 254)
        length = 0; /* a tombstone */
    if (sizes == 253)
        key_length = byte(input) % (key_length + 1);
    if (key_length > MAX_KEY)
        key_length = MAX_KEY;
    if (key_length)
        mdb_put(txns[where], tables[where][table], &(MDB_val){key_length, key}, &(MDB_val){length, value}, 0);
}

/* --- what is asked, and what comes back ---------------------------------------------------------------------------- */

static void check_listing(const uint8_t *at, const uint8_t *end, bool plus)
{
    while (at < end) {
        at += plus ? sizeof(struct fuse_entry_out) : 0;
        const struct fuse_dirent *dirent = (const void *)at;
        CHECK(at + FUSE_NAME_OFFSET <= end && at + FUSE_NAME_OFFSET + dirent->namelen <= end);
        at += FUSE_DIRENT_SIZE(dirent);
    }
    CHECK(at == end);
}

/* Are these the bytes of the blob that the index says, and as they were written? */
static void check_bytes(const uint8_t *data, uint64_t inode, uint64_t offset, size_t length)
{
    CHECK(!view_begin(&worker.view));
    for (uint64_t at = offset; at < offset + length;) {
        struct extent extent;
        CHECK(view_extent(&worker.view, inode, at, &extent));
        uint64_t from = at - extent.start, end = extent.start + extent.record.length;
        if (end > offset + length)
            end = offset + length;
        CHECK(extent.record.blob_offset + extent.record.length <= BLOB_BYTES);
        CHECK(!memcmp(data + (at - offset), content + extent.record.blob_offset + from, (size_t)(end - at)));
        for (uint64_t block = from / BLOCK_BYTES; block * BLOCK_BYTES < from + (end - at); block++) {
            uint64_t rest = extent.record.length - block * BLOCK_BYTES;
            CHECK(checksum(content + extent.record.blob_offset + block * BLOCK_BYTES,
                           rest < BLOCK_BYTES ? (size_t)rest : BLOCK_BYTES, SEED) == extent.checksums[block]);
        }
        at = end;
    }
    view_end(&worker.view);
}

static void ask(struct input *input)
{
    static const uint32_t opcodes[] = {
        FUSE_LOOKUP,      FUSE_GETATTR,  FUSE_READ,     FUSE_READ,      FUSE_READDIR,
        FUSE_READDIRPLUS, FUSE_READLINK, FUSE_GETXATTR, FUSE_LISTXATTR, FUSE_FORGET,
    };
    uint32_t opcode = opcodes[byte(input) % (sizeof opcodes / sizeof *opcodes)];
    _Alignas(8) uint8_t message[1024] = {0};
    struct fuse_in_header *header = (void *)message;
    *header = (struct fuse_in_header){.opcode = opcode, .unique = 2, .nodeid = inode(input)};
    uint8_t *body = message + sizeof *header;
    struct fuse_read_in *read_in = (void *)body;
    size_t length = 64;
    if (opcode == FUSE_LOOKUP) {
        length = name(input, (char *)body) + 1;
    } else if (opcode == FUSE_GETXATTR || opcode == FUSE_LISTXATTR) {
        ((struct fuse_getxattr_in *)body)->size = (uint32_t)number(input, 2);
        length = sizeof(struct fuse_getxattr_in);
        if (opcode == FUSE_GETXATTR)
            length += name(input, (char *)body + length) + 1;
    } else if (opcode == FUSE_READ || opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS) {
        *read_in = (struct fuse_read_in){.fh = byte(input) & 1 ? FAST_HANDLE : 0};
        read_in->offset = opcode == FUSE_READ ? number(input, 3) : byte(input) % 8;
        read_in->size = (uint32_t)length_of(input) % (MAX_READ_BYTES + 1);
        length = sizeof *read_in;
    }
    header->len = (uint32_t)(sizeof *header + length);
    struct request request;
    if (!request_parse(message, header->len, &request))
        return;
    CHECK(!ftruncate(fastpath.device, 0) && lseek(fastpath.device, 0, SEEK_SET) == 0);
    leader_become(&worker);
    struct inode_record record = {0};
    bool known = !view_begin(&worker.view) && view_inode(&worker.view, header->nodeid, &record);
    view_end(&worker.view);
    enum outcome outcome = answer_request(&worker, &request);
    view_end(&worker.view);
    leader_resign(&worker);
    CHECK(outcome == ANSWERED || outcome == PASS);
    static _Alignas(8) uint8_t reply[MAX_READ_BYTES + 4096];
    ssize_t got = pread(fastpath.device, reply, sizeof reply, 0);
    if (outcome == PASS || opcode == FUSE_FORGET) {
        CHECK(got == 0);
        return;
    }
    const struct fuse_out_header *out = (const void *)reply;
    CHECK(got >= (ssize_t)sizeof *out && out->len == got && out->unique == 2);
    size_t data = (size_t)got - sizeof *out;
    if (out->error) {
        CHECK(!data);
    } else if (opcode == FUSE_READ) {
        uint64_t rest = read_in->offset < record.size ? record.size - read_in->offset : 0;
        CHECK(known && data == (rest < read_in->size ? rest : read_in->size));
        check_bytes(reply + sizeof *out, header->nodeid, read_in->offset, data);
    } else if (opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS) {
        CHECK(data <= read_in->size);
        check_listing(reply + sizeof *out, reply + got, opcode == FUSE_READDIRPLUS);
    } else if (opcode == FUSE_LOOKUP) {
        CHECK(data == sizeof(struct fuse_entry_out));
    } else if (opcode == FUSE_GETATTR) {
        CHECK(data == sizeof(struct fuse_attr_out));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, data + size};
    memset(&shared, 0, offsetof(struct shared, counters));
    shared.flags = byte(&input) ^ (PINS_EVERYTHING | PINS_FILES);
    shared.seed = SEED;
    shared.small_file_bytes = 64 << 10;
    shared.serving = 1;
    shared.run = 2;
    shared.floor = byte(&input) % 4;
    worker.bypasses_index = false;
    fastpath.speculative_read = (struct speculative_read){.scratch = fastpath.speculative_read.scratch};
    MDB_txn *txns[2];
    for (int which = 0; which < 2; which++) {
        CHECK(!mdb_txn_begin(environments[which], NULL, 0, &txns[which]));
        for (int table = 0; table < TABLES; table++)
            CHECK(!mdb_drop(txns[which], tables[which][table], 0));
    }
    for (int left = byte(&input) % MOST_RECORDS; left--;)
        put_record(&input, txns);
    for (int which = 0; which < 2; which++)
        CHECK(!mdb_txn_commit(txns[which]));
    while (input.at < input.end)
        ask(&input);
    char path[512];
    for (uint64_t each = 0; each < 6; each++) {
        CHECK(!view_begin(&worker.view));
        if (view_path(&worker.view, each, path, sizeof path))
            CHECK(strlen(path) < sizeof path);
        struct extent extent;
        for (uint64_t at = 0; at < 1 << 24; at += 70001)
            if (view_extent(&worker.view, each, at, &extent))
                CHECK(extent.start <= at && at - extent.start < extent.record.length);
        view_end(&worker.view);
        speculative_read_lookup(&fastpath.speculative_read, each);
        fastpath.speculative_read.streak = 100;
        speculative_read_next(&fastpath.speculative_read, &worker.view, &fastpath.blob);
    }
    return 0;
}
