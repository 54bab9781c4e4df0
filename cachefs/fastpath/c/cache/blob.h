/* Reading and verifying payload of the blob. Writing is in `appender`. */
#pragma once

#include <stdbool.h>

#include "cache/index.h"

#define DIRECT_ALIGNMENT 4096u
#define MAX_READ_BYTES (1u << 20)
/* A read is widened to whole blocks, which have a checksum each, and then to whole pages. */
#define SCRATCH_BYTES(length) ((length) + 2 * BLOCK_BYTES + 2 * DIRECT_ALIGNMENT)
/* READs up to this size use a scratch that belongs to the thread. An epoch of small files consists of them. Larger READs take
 * a buffer. */
#define QUICK_READ_BYTES BLOCK_BYTES
#define QUICK_BYTES SCRATCH_BYTES(QUICK_READ_BYTES)

struct blob {
    int fd; /* O_DIRECT where the filesystem has it: the bytes are in the mount's page cache, not in two */
    bool direct;
    uint64_t seed;
};

/* `fd`: a descriptor of the blob, which stays open. The blob is opened again, if possible, for reads past the page cache. */
void blob_open(struct blob *blob, int fd, uint64_t seed);

/* `length` bytes (at most MAX_READ_BYTES) from `start` of an extent, verified. NULL: unreadable or corrupt.
 * `scratch`: SCRATCH_BYTES(length), aligned to DIRECT_ALIGNMENT; the result lies within. */
const void *blob_read(const struct blob *blob, const struct extent *extent, uint32_t start, uint32_t length, void *scratch);

uint64_t checksum(const void *data, size_t length, uint64_t seed);
