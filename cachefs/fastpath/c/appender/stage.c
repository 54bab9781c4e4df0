#include "appender/stage.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cache/blob.h"
#include "common/buffer.h"

#define ALLOCATION_BYTES ((uint64_t)4 << 20) /* what a crash may leave allocated and unused */
#define NOWHERE (UINT64_MAX / 2)

void stage_trim(struct stage *stage)
{
    uint64_t end = (stage->at + stage->used + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    if (end >= stage->allocated)
        return;
    fallocate(stage->buffered, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)end, (off_t)(stage->allocated - end));
    stage->allocated = end;
}

static void begin_at(struct stage *stage, uint64_t offset)
{
    stage_trim(stage);
    stage->at = stage->allocated = offset;
    stage->used = stage->flushed = 0;
}

bool stage_open(struct stage *stage, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *stage = (struct stage){.buffered = open(path, O_WRONLY | O_CLOEXEC), .buffer = buffer_memory(STAGE_BYTES)};
    stage->direct = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    if (stage->direct < 0)
        stage->direct = stage->buffered;
    begin_at(stage, NOWHERE);
    return stage->buffered >= 0 && stage->buffer;
}

static void allocate(struct stage *stage, uint64_t end)
{
    while (stage->allocated < end) { /* if it cannot, the write will say what is wrong */
        uint64_t next = (stage->allocated / ALLOCATION_BYTES + 1) * ALLOCATION_BYTES; /* slabs are multiples of it */
        fallocate(stage->buffered, 0, (off_t)stage->allocated, (off_t)(next - stage->allocated));
        stage->allocated = next;
    }
}

static bool write_pages(struct stage *stage, size_t length)
{
    allocate(stage, stage->at + length);
    int fd = stage->behind ? stage->buffered : stage->direct;
    size_t done = 0;
    while (done < length) {
        ssize_t written = pwrite(fd, stage->buffer + done, length - done, (off_t)(stage->at + done));
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
        begin_at(stage, offset);
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
    begin_at(stage, NOWHERE);
}
