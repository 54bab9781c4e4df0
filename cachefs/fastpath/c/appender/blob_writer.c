#include "appender/blob_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cache/blob.h"
#include "common/assertion.h"
#include "common/buffer.h"

#define ALLOCATION_BYTES ((uint64_t)4 << 20) /* the most that a crash leaves allocated and unused */
#define NOWHERE (UINT64_MAX / 2)

void blob_writer_trim(struct blob_writer *writer)
{
    uint64_t end = (writer->at + writer->used + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    if (end >= writer->allocated)
        return;
    fallocate(writer->buffered, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)end, (off_t)(writer->allocated - end));
    writer->allocated = end;
}

static void begin_at(struct blob_writer *writer, uint64_t offset)
{
    blob_writer_trim(writer);
    writer->at = writer->allocated = offset;
    writer->used = writer->flushed = 0;
}

bool blob_writer_open(struct blob_writer *writer, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *writer = (struct blob_writer){.buffered = fd, .buffer = buffer_memory(WRITER_BYTES)};
    writer->direct = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    if (writer->direct < 0)
        writer->direct = fd; /* on a disk that is read-only or dead, each write reports the error */
    begin_at(writer, NOWHERE);
    return writer->buffer;
}

static void allocate(struct blob_writer *writer, uint64_t end)
{
    while (writer->allocated < end) { /* if this fails, the write reports the error */
        uint64_t next = (writer->allocated / ALLOCATION_BYTES + 1) * ALLOCATION_BYTES; /* slabs are multiples of it */
        fallocate(writer->buffered, 0, (off_t)writer->allocated, (off_t)(next - writer->allocated));
        writer->allocated = next;
    }
}

static bool write_pages(struct blob_writer *writer, size_t length)
{
    ASSERT(length <= WRITER_BYTES && length % DIRECT_ALIGNMENT == 0 && writer->at % DIRECT_ALIGNMENT == 0);
    allocate(writer, writer->at + length);
    int fd = writer->behind ? writer->buffered : writer->direct;
    size_t done = 0;
    while (done < length) {
        ssize_t written = pwrite(fd, writer->buffer + done, length - done, (off_t)(writer->at + done));
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0 || (size_t)written % DIRECT_ALIGNMENT) { /* a full disk may end a write within a page */
            errno = written < 0 ? errno : ENOSPC;
            return false;
        }
        done += (size_t)written;
    }
    return true;
}

bool blob_writer_flush(struct blob_writer *writer)
{
    ASSERT(writer->flushed <= writer->used && writer->used <= WRITER_BYTES);
    if (writer->used == writer->flushed)
        return true;
    size_t whole = writer->used / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT, rest = writer->used - whole;
    memset(writer->buffer + writer->used, 0, rest ? DIRECT_ALIGNMENT - rest : 0);
    if (!write_pages(writer, rest ? whole + DIRECT_ALIGNMENT : whole))
        return false;
    memmove(writer->buffer, writer->buffer + whole, rest);
    writer->at += whole;
    writer->used = writer->flushed = rest;
    return true;
}

bool blob_writer_put(struct blob_writer *writer, uint64_t offset, const void *data, size_t length)
{
    const uint8_t *from = data;
    if (offset != writer->at + writer->used) {
        if (!blob_writer_flush(writer))
            return false;
        begin_at(writer, offset);
        if (offset % DIRECT_ALIGNMENT) {
            errno = EINVAL;
            return false;
        }
    }
    while (length) {
        size_t room = WRITER_BYTES - writer->used, part = length < room ? length : room;
        memcpy(writer->buffer + writer->used, from, part);
        writer->used += part;
        from += part;
        length -= part;
        if (writer->used == WRITER_BYTES && !blob_writer_flush(writer))
            return false;
    }
    return true;
}

void blob_writer_drop(struct blob_writer *writer)
{
    begin_at(writer, NOWHERE);
}
