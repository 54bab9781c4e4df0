#include "misses/miss.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>

#include "common/buffer.h"
#include "common/clock.h"
#include "misses/miss_threads.h"
#include "relay/lot.h"

#define THREADS_FOR_HITS 4 /* serving threads that never wait for the source, which may hang */
#define PROBE_NS 1000000000u

/* Before the answer is out: its reader may ask for the count. */
static void count_hit(struct worker *worker, const struct waiter *reader)
{
    worker->counters->hits++;
    worker->counters->hit_bytes += reader->length;
}

/* Of a fetch whose payload is in memory. The caller has a reference, which is dropped. */
static enum outcome answer_fetched(struct worker *worker, struct fetch *fetch, const struct waiter *reader)
{
    count_hit(worker, reader);
    answer_waiter(worker->fastpath->misses, reader, fetch);
    lock_take(&miss_lock);
    fetch_release_locked(fetch);
    lock_release(&miss_lock);
    return ANSWERED;
}

/* Of a fetch that is in the blob, and not in the index yet. */
static enum outcome answer_appended(struct worker *worker, const struct extent *extent, const struct waiter *reader)
{
    uint32_t start = (uint32_t)(reader->offset - extent->start);
    uint8_t *buffer = reader->length > QUICK_READ_BYTES ? buffer_take() : worker->scratch;
    const void *data = buffer ? blob_read(&worker->fastpath->blob, extent, start, reader->length, buffer) : NULL;
    if (data) {
        count_hit(worker, reader);
        worker->counters->disk_bytes += reader->length;
        reply(worker->fastpath->device, reader->unique, 0, data, reader->length);
    }
    if (buffer && buffer != worker->scratch)
        buffer_give(buffer);
    return data ? ANSWERED : PASS;
}

/* Begins the view, unless the request bypasses the index; the caller ends it. */
static struct known known_locked(struct worker *worker, uint64_t inode, uint64_t version) REQUIRES(miss_lock)
{
    bool uses_index = !worker->bypasses_index && !view_begin(&worker->view);
    return (struct known){&worker->fastpath->misses->table, uses_index ? &worker->view : NULL, inode, version};
}

/* A READ of a file, as `miss_read` has it, and what follows once the lock is released. */
struct miss {
    const struct inode_record *record;
    const char *path;
    uint64_t inode, end; /* `end`: of the READ */
    struct waiter reader;
    enum outcome outcome;
    bool refused;                           /* ETIMEDOUT */
    struct fetch *fetched, *own;            /* to be answered from; to be run by this thread; NULL: none */
    struct extent appended;                 /* to be answered from, `start` is its offset in the file; length 0: none */
    struct miss_thread *thread, *readahead; /* to be woken; NULL: none */
};

/* At the first READ of a window of a file that is read sequentially, the next window is fetched, as the kernel's readahead
 * does for other readers. */
static void start_readahead_locked(struct misses *misses, struct miss *miss, const struct known *known,
                                   uint64_t end) REQUIRES(miss_lock)
{
    const struct shared *shared = misses->fastpath->shared;
    if (!(shared->flags & READS_AHEAD) || !misses->idle_count || (miss->record->flags & YOUNG))
        return;
    struct window next = window_after_locked(known, miss->record->size, end);
    uint32_t length = (uint32_t)(next.end - next.start);
    if (!length || !may_cache_locked(misses, length, true))
        return;
    struct fetch *fetch =
        add_fetch_locked(misses, miss->record, miss->inode, miss->path, true, next.start, length, &miss->reader);
    if (!fetch)
        return;
    fetch->readahead = true;
    miss->readahead = start_fetch_locked(misses, fetch);
}

/* A fetch of what a READ asks for, or of more. NULL: no memory. */
static struct fetch *begin_fetch_locked(struct worker *worker, struct miss *miss, const struct known *known) REQUIRES(miss_lock)
{
    struct misses *misses = worker->fastpath->misses;
    const struct shared *shared = misses->fastpath->shared;
    const struct inode_record *record = miss->record;
    uint64_t start = miss->reader.offset;
    struct window window = is_small(shared, record->size) ? (struct window){0, record->size, false}
                                                          : window_of_locked(known, record->size, start, miss->end);
    bool young = record->flags & YOUNG;
    bool cached = !young && may_cache_locked(misses, (uint32_t)(window.end - window.start), false);
    worker->counters->skipped_admissions += !cached && !young;
    if (!cached)
        window = (struct window){start, miss->end, false};
    uint32_t length = (uint32_t)(window.end - window.start);
    struct fetch *fetch =
        add_fetch_locked(misses, record, miss->inode, miss->path, cached, window.start, length, &miss->reader);
    if (fetch)
        fetch->young = young;
    if (fetch && window.streams)
        start_readahead_locked(misses, miss, known, window.end);
    return fetch;
}

/* All threads of the owner wait for the source: its READs fail at once, but once a second Python may try one. */
static bool may_probe_locked(struct misses *misses) REQUIRES(miss_lock)
{
    uint64_t now = monotonic_ns();
    if (now < misses->next_probe_ns)
        return false;
    misses->next_probe_ns = now + PROBE_NS;
    return true;
}

/* A READ joins a fetch that is under way, or begins one. */
static void join_locked(struct worker *worker, struct miss *miss, struct fetch *fetch) REQUIRES(miss_lock)
{
    struct misses *misses = worker->fastpath->misses;
    uint32_t owner = miss->reader.owner;
    struct waiter *waiter = malloc(sizeof *waiter);
    bool new = !fetch;
    if (waiter && new) {
        struct known known = known_locked(worker, miss->inode, miss->record->version);
        /* What left the table since this request looked into the index is in the index by now. */
        if (known.view && view_has_range(known.view, miss->inode, miss->record->version, miss->reader.offset, miss->end))
            miss->outcome = AGAIN;
        else if (is_stuck_locked(misses, owner))
            miss->refused = !may_probe_locked(misses);
        else
            fetch = begin_fetch_locked(worker, miss, &known);
        view_end(&worker->view);
    }
    if (!waiter || !fetch) {
        free(waiter);
        return;
    }
    *waiter = miss->reader;
    waiter->next = fetch->waiters;
    fetch->waiters = waiter;
    miss->outcome = TAKEN;
    /* Most serving threads may fetch themselves, which saves a wake-up. The others remain for hits. */
    if (new && misses->inline_count + THREADS_FOR_HITS < misses->fastpath->shared->threads &&
        !shares_full(&misses->shares, owner)) {
        misses->inline_count++;
        mark_fetching_locked(misses, fetch);
        miss->own = fetch;
    } else if (new) {
        miss->thread = start_fetch_locked(misses, fetch);
    } else if (fetch->state == FETCH_QUEUED && !shares_full(&misses->shares, owner)) {
        miss->thread = start_queued_locked(misses); /* it waited for the share of another owner; ours may have room */
    }
}

/* Decides how a READ is answered. */
static void decide_locked(struct worker *worker, struct miss *miss) REQUIRES(miss_lock)
{
    struct misses *misses = worker->fastpath->misses;
    uint64_t version = miss->record->version;
    struct fetch *fetch = find_fetch_locked(&misses->table, miss->inode, version, miss->reader.offset, miss->end);
    if (fetch && fetch->readahead) {
        fetch->readahead = false;
        struct known known = known_locked(worker, miss->inode, version);
        start_readahead_locked(misses, miss, &known, fetch->offset + fetch->length);
        view_end(&worker->view);
    }
    if (fetch && fetch->state == FETCH_FETCHED) {
        fetch->references++;
        miss->fetched = fetch;
    } else if (fetch && fetch->state == FETCH_APPENDED) {
        miss->appended = fetch->extent;
        miss->appended.start = fetch->offset;
    } else if (relay_claim(&worker->fastpath->relay, worker->slot)) {
        join_locked(worker, miss, fetch);
    } /* else the request waits for its owner's share of slots, and is served again then */
}

enum outcome miss_read(struct worker *worker, const struct inode_record *record, const struct request *request)
{
    struct misses *misses = worker->fastpath->misses;
    const struct fuse_read_in *in = request->body;
    uint64_t inode = request->header->nodeid, end = in->offset + in->size;
    char path[MAX_PATH];
    if (!misses || (record->flags & (STALE | UNLINKED)) || !view_path(&worker->view, inode, path, sizeof path))
        return PASS;
    view_end(&worker->view);
    if (end > record->size)
        end = record->size;
    struct miss miss = {.record = record, .path = path, .inode = inode, .end = end, .outcome = PASS};
    miss.reader = (struct waiter){
        .slot = worker->slot, .unique = request->header->unique, .offset = in->offset, .since_ns = worker->begun_ns,
        .length = (uint32_t)(end - in->offset), .owner = request->header->uid,
        .group = request->header->gid};
    lock_take(&miss_lock);
    decide_locked(worker, &miss);
    lock_release(&miss_lock);
    miss_thread_wake(miss.readahead);
    miss_thread_wake(miss.thread);
    if (miss.fetched)
        return answer_fetched(worker, miss.fetched, &miss.reader);
    if (miss.appended.record.length)
        return answer_appended(worker, &miss.appended, &miss.reader);
    if (miss.refused) {
        worker->counters->source_timeouts++;
        return answer(worker, request, ETIMEDOUT, NULL, 0);
    }
    if (miss.own) {
        leader_resign(worker);
        run_fetch(misses, miss.own, worker->counters);
        lock_take(&miss_lock);
        misses->inline_count--;
        lock_release(&miss_lock);
    }
    return miss.outcome;
}

bool miss_interrupt(struct misses *misses, uint64_t unique)
{
    if (!misses)
        return false;
    lock_take(&miss_lock);
    struct waiter *waiter = take_waiter_locked(&misses->table, unique);
    lock_release(&miss_lock);
    if (waiter) {
        reply(misses->fastpath->device, unique, EINTR, NULL, 0);
        relay_free_slot(&misses->fastpath->relay, waiter->slot);
        free(waiter);
    }
    return waiter != NULL;
}

/* Moves the fetch's waiters to `late`. */
static void abandon_locked(struct misses *misses, struct fetch *fetch, struct waiter **late) REQUIRES(miss_lock)
{
    while (fetch->waiters) {
        struct waiter *waiter = fetch->waiters;
        fetch->waiters = waiter->next;
        waiter->next = *late;
        *late = waiter;
    }
    remove_from_table_locked(&misses->table, fetch);
    if (fetch->state == FETCH_FETCHING) { /* its thread sees the state when the source answers */
        fetch->state = FETCH_ABANDONED;
        count_stuck_locked(misses, fetch, true);
        return;
    }
    queue_remove(&misses->queue, fetch);
    if (fetch->cached)
        count_buffered_locked(misses, -(int64_t)fetch->length);
    fetch->references = 1;
    fetch_release_locked(fetch);
}

void miss_tick(struct misses *misses)
{
    if (!misses)
        return;
    uint64_t limit = misses->fastpath->shared->source_timeout_ns;
    struct waiter *late = NULL;
    struct fetch *fetch;
    lock_take(&miss_lock);
    uint64_t now = monotonic_ns(); /* under the lock: no fetch in the table is younger, so that no age is negative */
    while ((fetch = oldest_unfetched_locked(&misses->table)) && now - fetch->since_ns > limit)
        abandon_locked(misses, fetch, &late);
    lock_release(&miss_lock);
    while (late) {
        struct waiter *waiter = late;
        late = waiter->next;
        misses->all[0].counters->source_timeouts++; /* before the answer is out, as hits are */
        reply(misses->fastpath->device, waiter->unique, ETIMEDOUT, NULL, 0);
        relay_free_slot(&misses->fastpath->relay, waiter->slot);
        free(waiter);
    }
    uint64_t resolved = append_tick(misses->fastpath->appender);
    lock_take(&miss_lock);
    resolve_pending_locked(&misses->table, resolved);
    lock_release(&miss_lock);
}

int miss_start(struct fastpath *fastpath, int blob_fd)
{
    struct shared *shared = fastpath->shared;
    if (!(shared->flags & KEEPS_DATA))
        return 0;
    if (!shared->fetch_threads || shared->threads < THREADS_FOR_HITS ||
        shared->threads + FETCH_THREADS(shared) > MAX_THREADS)
        return EINVAL;
    /* Payload is allocated and freed by the megabyte: keep the memory, and few arenas. New pages cost more than the copy. */
    mallopt(M_ARENA_MAX, 2);
    mallopt(M_MMAP_THRESHOLD, CHUNK_BYTES * 2);
    mallopt(M_TRIM_THRESHOLD, MAX_BUFFERED_BYTES);
    struct misses *misses = calloc(1, sizeof *misses);
    if (!misses)
        return ENOMEM;
    misses->fastpath = fastpath;
    shared->stuck = shared->buffered_bytes = 0; /* a killed predecessor may have left other numbers */
    uint32_t most = FETCH_THREADS(shared) + shared->threads - THREADS_FOR_HITS;
    uint32_t reserve = reserved_threads(shared), places = most + reserve;
    if (!shares_init(&misses->shares, most, reserve, places) || !shares_init(&misses->stuck_shares, most, reserve, places))
        return ENOMEM;
    prefetch_init(&misses->prefetch, shared);
    fastpath->appender = append_start(shared, &fastpath->daemon, blob_fd, &miss_append_events, misses);
    if (!fastpath->appender)
        return errno;
    fastpath->misses = misses;
    return miss_threads_start(misses, shared);
}
