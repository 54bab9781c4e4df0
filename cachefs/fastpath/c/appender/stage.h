/* Bytes on their way to the blob: gathered, and written in whole pages past the page cache, where a copy of them would cost
 * more than the disk does. Into space that was allocated before: a write that extends the file would hold up the hits. The
 * last page of a flush is filled up with zeros, kept, and written again with what follows. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STAGE_BYTES (1u << 20)

struct stage {
    int direct, buffered; /* descriptors; the same one where the filesystem has no O_DIRECT */
    bool behind;          /* the disk does not keep up: to the page cache, as long as that takes it */
    uint8_t *buffer;
    uint64_t at; /* where the buffer lies in the blob */
    uint64_t allocated; /* up to here */
    size_t used, flushed;
};

/* `fd`: any descriptor of the blob; it is opened again. False: no memory, or it cannot be opened. */
bool stage_open(struct stage *stage, int fd);
/* Bytes for `offset`: right behind the last ones, or the start of a page. False, with errno: see `stage_drop`. */
bool stage_put(struct stage *stage, uint64_t offset, const void *data, size_t length);
/* Everything that was put is written. False, with errno. */
bool stage_flush(struct stage *stage);
/* Gives back what was allocated and is not used, for the time being. */
void stage_trim(struct stage *stage);
/* After an error, or at the end: nothing is ever written behind what was put until now. */
void stage_drop(struct stage *stage);
