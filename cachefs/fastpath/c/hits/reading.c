#include "hits/reading.h"

#include "common/buffer.h"
#include "common/clock.h"
#include "misses/miss.h"

/* Several READs of a unit in a row are one access. */
static void log_access(const struct worker *worker, uint64_t inode, uint64_t offset)
{
    struct access_log *log = worker->log;
    if (!log)
        return;
    uint64_t count = log->written, unit = offset / CHUNK_BYTES & ACCESS_UNIT_MASK;
    const struct access *last = &log->entries[(count - 1) % ACCESS_ENTRIES];
    if (count && last->inode == inode && (last->when_and_unit & ACCESS_UNIT_MASK) == unit)
        return;
    log->entries[count % ACCESS_ENTRIES] = (struct access){inode, monotonic_ns() / 1000 << ACCESS_UNIT_BITS | unit};
    log->written = count + 1;
}

/* Bytes of an extent, from `start` of it. NULL: they are corrupt. The transaction stays open until the bytes are read: no
 * hole is punched there meanwhile (hazard 14). */
static const void *cached_bytes(struct worker *worker, uint64_t inode, const struct extent *extent, uint32_t start,
                                uint32_t length, void *scratch)
{
    struct fastpath *fastpath = worker->fastpath;
    const uint8_t *guessed = NULL;
    if (worker->is_leader) {
        assert_leader(worker);
        guessed = speculative_read_data(&fastpath->speculative_read, inode, extent, start + length);
    }
    if (guessed) {
        worker->counters->guessed++;
        return guessed + start;
    }
    const void *data = blob_read(&fastpath->blob, extent, start, length, scratch);
    if (!data) { /* the daemon drops the record; here it is a miss like any other */
        uint64_t place = extent->record.blob_offset;
        worker->counters->corrupt++;
        worker->bypasses_index = true;
        daemon_send(&fastpath->daemon, CONTROL_CORRUPT, inode, extent->start, &place, sizeof place);
    }
    return data;
}

/* `extent`: the one that contains the byte at `in->offset`. `scratch`: of `room` bytes, for all parts. */
static enum outcome serve_cached(struct worker *worker, const struct request *request, const struct inode_record *record,
                                 struct extent *extent, uint64_t end, uint8_t *scratch, size_t room)
{
    const struct fuse_read_in *in = request->body;
    struct iovec parts[MAX_REPLY_PARTS];
    int count = 0;
    uint64_t inode = request->header->nodeid, offset = in->offset;
    for (;;) {
        uint64_t extent_end = extent->start + extent->record.length;
        uint32_t start = (uint32_t)(offset - extent->start);
        uint32_t length = (uint32_t)((extent_end < end ? extent_end : end) - offset);
        size_t needed = SCRATCH_BYTES((size_t)length);
        if (count == MAX_REPLY_PARTS || needed > room)
            return PASS; /* in many pieces: rare, so Python answers */
        const void *data = cached_bytes(worker, inode, extent, start, length, scratch);
        if (!data)
            return miss_read(worker, record, request);
        parts[count++] = (struct iovec){(void *)data, length};
        offset += length;
        if (offset == end)
            break;
        needed = (needed + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
        scratch += needed;
        room -= needed < room ? needed : room;
        if (!view_extent(&worker->view, inode, offset, extent) || extent->record.version != record->version)
            return miss_read(worker, record, request);
    }
    view_end(&worker->view);
    worker->counters->hits++; /* before the answer is out: its reader may ask for the count */
    worker->counters->hit_bytes += end - in->offset;
    worker->counters->disk_bytes += end - in->offset;
    reply_parts(worker->fastpath->device, request->header->unique, parts, count);
    return ANSWERED;
}

enum outcome answer_read(struct worker *worker, const struct request *request)
{
    const struct fuse_read_in *in = request->body;
    struct inode_record record;
    struct extent extent;
    uint64_t inode = request->header->nodeid, end = in->offset + in->size;
    if (in->size > MAX_READ_BYTES || !view_inode(&worker->view, inode, &record))
        return PASS;
    /* A reader with a handle of ours may be faster than our report of the OPEN. The record was valid at that OPEN. It may have
     * expired since: a fetch compares it with the source. */
    bool ours = (in->fh & FAST_HANDLE) || (worker->fastpath->shared->flags & NO_OPEN);
    bool opened = ours && is_immutable_on_open(&record);
    if (!opened && !(remaining_ns(&worker->view, &record) && is_immutable(&worker->view, &record)))
        return PASS;
    log_access(worker, inode, in->offset);
    if (end > record.size)
        end = record.size;
    if (in->offset >= end) {
        view_end(&worker->view);
        return answer(worker, request, 0, NULL, 0);
    }
    bool quick = end <= in->offset + QUICK_READ_BYTES;
    if (!quick)
        leader_resign(worker);
    if (!view_extent(&worker->view, inode, in->offset, &extent) || extent.record.version != record.version)
        return miss_read(worker, &record, request); /* it takes a buffer itself */
    if (quick && end <= extent.start + extent.record.length)
        return serve_cached(worker, request, &record, &extent, end, worker->scratch, QUICK_BYTES);
    leader_resign(worker);
    uint8_t *buffer = buffer_take();
    if (!buffer)
        return PASS;
    enum outcome outcome = serve_cached(worker, request, &record, &extent, end, buffer, BUFFER_BYTES);
    buffer_give(buffer);
    return outcome;
}
