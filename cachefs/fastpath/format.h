/* The structs of the index and of the blob as they lie on disk: docs/FORMAT.md. Little-endian, naturally aligned.
 *
 * LMDB aligns values to two bytes only, so they are copied into these structs, never read in place. `attributes.py`
 * packs the same layout; `cachefs-fastpath --layout` prints this one and a test compares the two. */
#ifndef CACHEFS_FORMAT_H
#define CACHEFS_FORMAT_H

#include <assert.h>
#include <stdint.h>

enum flag {
    PINNED = 1,
    IMMUTABLE = 2,
    WRITTEN = 4,
    LISTED = 8,
    UNSETTLED = 16,
    STALE = 32,
    UNLINKED = 64,
    FREEZABLE = 128,
    KNOWN_FLAGS = 255, /* a record with any other is of a later version: not for us to judge */
};

#define ROOT_INODE 1
#define FIRST_POSITION 3 /* 1 and 2 are "." and ".." */
#define BLOCK_BYTES (128u << 10)
#define CHUNK_BYTES (4u << 20)
#define SLAB_BYTES ((uint64_t)64 << 20) /* of the blob: what one writer is granted */
#define RECORD_HEADER_BYTES 128u
#define RECORD_MAGIC 0x53464843u
#define RECORD_FORMAT 1
#define RECORD_DATA 1

static inline uint32_t block_count(uint32_t length)
{
    return (uint32_t)((length + (uint64_t)BLOCK_BYTES - 1) / BLOCK_BYTES);
}

struct inode_record {
    uint32_t flags, mode, nlink, uid, gid, rdev, reserved, blksize;
    uint64_t size, blocks;
    int64_t atime_ns, mtime_ns, ctime_ns, btime_ns;
    uint64_t device, source_inode, version, stamp, entries_stamp, next_position, expires_ns, lookups;
};
static_assert(sizeof(struct inode_record) == 144, "inode record");

struct dentry_record {
    uint32_t flags, zero;
    uint64_t inode, stamp, position;
};
static_assert(sizeof(struct dentry_record) == 32, "dentry");

struct extent_record { /* the checksums follow, one for each BLOCK_BYTES of payload */
    uint32_t flags, length;
    uint64_t blob_offset, version, record_bytes;
};
static_assert(sizeof(struct extent_record) == 32, "extent");

struct record_header { /* of a record in the blob */
    uint32_t magic;
    uint16_t format, type;
    uint64_t length, inode, file_offset, version, size;
    int64_t mtime_ns, ctime_ns, btime_ns, reserved;
    uint64_t device, source_inode;
    uint32_t mode, blocks;
    uint64_t table_checksum, reserved2, checksum;
};
static_assert(sizeof(struct record_header) == RECORD_HEADER_BYTES, "record header");

#endif
