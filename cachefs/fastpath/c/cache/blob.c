#include "cache/blob.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "common/assertion.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t checksum(const void *data, size_t length, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, length, seed);
}

void blob_open(struct blob *blob, int fd, uint64_t seed)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *blob = (struct blob){.fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC), .direct = true, .seed = seed};
    if (blob->fd < 0)
        *blob = (struct blob){.fd = fd, .seed = seed};
}

/* Bytes read, which is less than `length` only after an error or at the end of the blob. */
static size_t read_all(int fd, char *buffer, size_t length, uint64_t offset)
{
    size_t done = 0;
    while (done < length && done % DIRECT_ALIGNMENT == 0) { /* the blob ends where a read ends within a page */
        ssize_t got = pread(fd, buffer + done, length - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    return done;
}

const void *blob_read(const struct blob *blob, const struct extent *extent, uint32_t start, uint32_t length, void *scratch)
{
    ASSERT(length && length <= MAX_READ_BYTES && (uintptr_t)scratch % DIRECT_ALIGNMENT == 0);
    ASSERT((uint64_t)start + length <= extent->record.length);
    uint32_t first = start / BLOCK_BYTES, last = (start + length - 1) / BLOCK_BYTES;
    uint32_t from = first * BLOCK_BYTES;
    uint64_t to = (uint64_t)(last + 1) * BLOCK_BYTES;
    if (to > extent->record.length)
        to = extent->record.length;
    uint64_t begin = extent->record.blob_offset + from;
    uint64_t aligned = begin / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    size_t skip = (size_t)(begin - aligned), wanted = skip + (size_t)(to - from);
    size_t rounded = (wanted + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    size_t got = read_all(blob->fd, scratch, rounded, aligned);
    if (!blob->direct)
        posix_fadvise(blob->fd, (off_t)aligned, (off_t)rounded, POSIX_FADV_DONTNEED);
    if (got < wanted)
        return NULL;
    const char *data = (char *)scratch + skip;
    for (uint32_t block = first; block <= last; block++) {
        uint64_t at = (uint64_t)block * BLOCK_BYTES;
        uint64_t size = at + BLOCK_BYTES < to ? BLOCK_BYTES : to - at;
        if (checksum(data + (at - from), (size_t)size, blob->seed) != extent->checksums[block])
            return NULL;
    }
    return data + (start - from);
}
