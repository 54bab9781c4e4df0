#include "stage.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blob.h"
#include "buffer.h"


bool stage_open(struct stage *stage, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *stage = (struct stage){.fd = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC)};
    if (stage->fd < 0) /* a filesystem without O_DIRECT */
        stage->fd = open(path, O_WRONLY | O_CLOEXEC);
    stage->buffer = buffer_memory(STAGE_BYTES);
    return stage->fd >= 0 && stage->buffer;
}

static bool write_pages(const struct stage *stage, size_t length)
{
    size_t done = 0;
    while (done < length) {
        ssize_t written = pwrite(stage->fd, stage->buffer + done, length - done, (off_t)(stage->at + done));
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0 || (size_t)written % DIRECT_ALIGNMENT) { /* a full disk ends a write anywhere */
            errno = written < 0 ? errno : ENOSPC;
            return false;
        }
        done += (size_t)written;
    }
    return true;
}

bool stage_flush(struct stage *stage)
{
    if (stage->used == stage->flushed)
        return true;
    size_t whole = stage->used / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT, rest = stage->used - whole;
    memset(stage->buffer + stage->used, 0, rest ? DIRECT_ALIGNMENT - rest : 0);
    if (!write_pages(stage, rest ? whole + DIRECT_ALIGNMENT : whole))
        return false;
    memmove(stage->buffer, stage->buffer + whole, rest);
    stage->at += whole;
    stage->used = stage->flushed = rest;
    return true;
}

bool stage_put(struct stage *stage, uint64_t offset, const void *data, size_t length)
{
    const uint8_t *from = data;
    if (offset != stage->at + stage->used) {
        if (!stage_flush(stage))
            return false;
        *stage = (struct stage){.fd = stage->fd, .buffer = stage->buffer, .at = offset};
        if (offset % DIRECT_ALIGNMENT) {
            errno = EINVAL;
            return false;
        }
    }
    while (length) {
        size_t room = STAGE_BYTES - stage->used, part = length < room ? length : room;
        memcpy(stage->buffer + stage->used, from, part);
        stage->used += part;
        from += part;
        length -= part;
        if (stage->used == STAGE_BYTES && !stage_flush(stage))
            return false;
    }
    return true;
}

void stage_drop(struct stage *stage)
{
    *stage = (struct stage){.fd = stage->fd, .buffer = stage->buffer, .at = UINT64_MAX / 2};
}
