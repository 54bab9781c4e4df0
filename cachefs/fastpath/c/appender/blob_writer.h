/* Gathers bytes for the blob and writes them in whole pages past the page cache, where a copy of them would cost more than
 * the disk does. They are written into space that was allocated before: a write that extends the file would delay hits. The
 * last page of a flush is filled up with zeros, kept, and written again with the bytes that follow. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WRITER_BYTES (1u << 20)

struct blob_writer { /* used by the appender's thread, or by append_drain while that thread is idle */
    int direct, buffered; /* descriptors; the same one where the blob cannot be opened with O_DIRECT */
    bool behind;          /* the disk does not keep up: write to the page cache, as long as it takes data */
    uint8_t *buffer;
    uint64_t at;        /* the buffer's offset in the blob */
    uint64_t allocated; /* up to this offset */
    size_t used, flushed;
};

/* `fd`: a descriptor of the blob, without O_DIRECT, which stays open. False: no memory. */
bool blob_writer_open(struct blob_writer *writer, int fd);
/* Bytes for `offset`: directly behind the last ones, or at the start of a page. False, with errno: see `blob_writer_drop`. */
bool blob_writer_put(struct blob_writer *writer, uint64_t offset, const void *data, size_t length);
/* Writes everything that was put. False, with errno. */
bool blob_writer_flush(struct blob_writer *writer);
/* Gives back what was allocated and is not used yet. */
void blob_writer_trim(struct blob_writer *writer);
/* After an error, or at the end: nothing is ever written behind what was put until now. */
void blob_writer_drop(struct blob_writer *writer);
