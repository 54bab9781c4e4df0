#include "misses/fill.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>

#include "cache/age.h"
#include "common/buffer.h"
#include "common/clock.h"
#include "misses/fetching.h"
#include "relay/lot.h"

#define THREADS_FOR_HITS 4 /* are never lent to the source, which may hang */
#define PROBE_NS 1000000000u

static void add_waiter(struct fetch *fetch, struct waiter *waiter)
{
    waiter->next = fetch->waiters;
    fetch->waiters = waiter;
}

/* Before the answer is out: whoever has it may ask for the count. */
static void count_hit(struct worker *worker, const struct waiter *waiter)
{
    worker->counters->hits++;
    worker->counters->hit_bytes += waiter->length;
}

/* Fetched a moment ago, and not in the index yet. */
static enum outcome answer_fetched(struct worker *worker, struct fetch *fetch, const struct waiter *waiter)
{
    struct fill *fill = worker->fastpath->fill;
    if (fetch->state == FETCH_FETCHED) {
        fetch->references++;
        pthread_mutex_unlock(&fill->lock);
        count_hit(worker, waiter);
        fill_answer(fill, waiter, fetch);
        pthread_mutex_lock(&fill->lock);
        fetch_release(fetch);
        pthread_mutex_unlock(&fill->lock);
    } else {
        struct extent extent = fetch->extent;
        uint32_t start = (uint32_t)(waiter->offset - fetch->offset);
        pthread_mutex_unlock(&fill->lock);
        uint8_t *buffer = waiter->length > QUICK_READ_BYTES ? buffer_take() : worker->scratch;
        const void *data = buffer ? blob_read(&fill->fastpath->blob, &extent, start, waiter->length, buffer) : NULL;
        if (data) {
            count_hit(worker, waiter);
            worker->counters->disk_bytes += waiter->length;
            reply(fill->fastpath->device, waiter->unique, 0, data, waiter->length);
        }
        if (buffer && buffer != worker->scratch)
            buffer_give(buffer);
        if (!data)
            return PASS;
    }
    return ANSWERED;
}

/* What can be known now. The view, if there is one, is to be ended. */
static struct known what_is_known(struct worker *worker, uint64_t inode, uint64_t version)
{
    bool is_trusted = !worker->distrusts && !view_begin(&worker->view);
    return (struct known){&worker->fastpath->fill->table, is_trusted ? &worker->view : NULL, inode, version};
}

/* The first READ of a window of a file that somebody reads on and on: the next one is fetched meanwhile, as the kernel
 * would have done for a direct reader. Who is to be woken for it, or NULL. */
static struct fetcher *read_ahead_locked(struct fill *fill, const struct known *known, const struct inode_record *record,
                                         const char *path, uint64_t end, uint32_t owner)
{
    if (!(fill->fastpath->shared->flags & READS_AHEAD) || !fill->idle_count || is_young(fill->fastpath->shared, record))
        return NULL;
    struct window next = window_after(known, record->size, end);
    uint32_t length = (uint32_t)(next.end - next.start);
    if (!length || !fill_admits(fill, length, true))
        return NULL;
    struct fetch *fetch = fill_add(fill, record, known->inode, path, true, next.start, length, owner);
    if (!fetch)
        return NULL;
    fetch->ahead = true;
    return fill_start_fetch(fill, fetch);
}

/* A fetch of what a READ asks for, or of more. `ahead`: who is to be woken for what comes after it. NULL: no memory. */
static struct fetch *begin_fetch(struct worker *worker, const struct inode_record *record, const char *path,
                                 const struct known *known, uint64_t start, uint64_t end, uint32_t owner,
                                 struct fetcher **ahead)
{
    struct fill *fill = worker->fastpath->fill;
    struct window window = {0, record->size, false};
    if (!is_small(fill->fastpath->shared, record->size))
        window = window_of(known, record->size, start, end);
    bool young = is_young(fill->fastpath->shared, record);
    bool cached = !young && fill_admits(fill, (uint32_t)(window.end - window.start), false);
    worker->counters->skipped_admissions += !cached && !young;
    if (!cached)
        window = (struct window){start, end, false};
    uint32_t length = (uint32_t)(window.end - window.start);
    struct fetch *fetch = fill_add(fill, record, known->inode, path, cached, window.start, length, owner);
    if (fetch)
        fetch->young = young;
    if (fetch && window.streams)
        *ahead = read_ahead_locked(fill, known, record, path, window.end, owner);
    return fetch;
}

/* Every thread waits for the source: fail at once, but for one request a second that Python may try. Unlocks. */
static enum outcome refuse(struct worker *worker, const struct request *request)
{
    struct fill *fill = worker->fastpath->fill;
    uint64_t now = monotonic_ns();
    bool probe = now >= fill->next_probe_ns;
    if (probe)
        fill->next_probe_ns = now + PROBE_NS;
    pthread_mutex_unlock(&fill->lock);
    if (probe)
        return PASS;
    worker->counters->source_timeouts++;
    reply(fill->fastpath->device, request->header->unique, ETIMEDOUT, NULL, 0);
    return ANSWERED;
}

/* A READ has joined a fetch; `new`: it began the fetch. Gives it to a thread, perhaps to this one. Unlocks. */
static void run_or_wake(struct worker *worker, struct fetch *fetch, uint32_t owner, bool new, struct fetcher *ahead)
{
    struct fill *fill = worker->fastpath->fill;
    /* It may have waited for the share of another owner, and ours may have room. */
    bool joins = !new && fetch->state == FETCH_QUEUED && !shares_full(&fill->shares, owner);
    struct fetcher *fetcher = joins ? fill_start_queued(fill) : NULL;
    /* Most serving threads may fetch themselves: that saves a wake-up. The others are there for hits. */
    bool ourselves = new && fill->inline_count + THREADS_FOR_HITS < fill->fastpath->shared->threads &&
                     !shares_full(&fill->shares, owner);
    if (ourselves) {
        fill->inline_count++;
        fill_begin(fill, fetch);
    } else if (new) {
        fetcher = fill_start_fetch(fill, fetch);
    }
    pthread_mutex_unlock(&fill->lock);
    fill_wake(ahead);
    fill_wake(fetcher);
    if (ourselves) {
        give_turn(worker);
        fill_run(fill, fetch, worker->counters);
        pthread_mutex_lock(&fill->lock);
        fill->inline_count--;
        pthread_mutex_unlock(&fill->lock);
    }
}

enum outcome fill_read(struct worker *worker, const struct inode_record *record, const struct request *request)
{
    struct fill *fill = worker->fastpath->fill;
    const struct fuse_read_in *in = request->body;
    uint64_t inode = request->header->nodeid, end = in->offset + in->size;
    uint32_t owner = request->header->uid;
    char path[MAX_PATH];
    if (!fill || (record->flags & (STALE | UNLINKED)) || !view_path(&worker->view, inode, path, sizeof path))
        return PASS;
    view_end(&worker->view);
    if (end > record->size)
        end = record->size;
    struct waiter reader = {
        .slot = worker->slot, .unique = request->header->unique, .offset = in->offset,
        .since_ns = worker->begun_ns, .length = (uint32_t)(end - in->offset), .owner = owner};

    pthread_mutex_lock(&fill->lock);
    struct fetch *fetch = table_find(&fill->table, inode, record->version, in->offset, end);
    struct fetcher *ahead = NULL;
    if (fetch && fetch->ahead) {
        fetch->ahead = false;
        struct known known = what_is_known(worker, inode, record->version);
        ahead = read_ahead_locked(fill, &known, record, path, fetch->offset + fetch->length, owner);
        view_end(&worker->view);
    }
    if (fetch && fetch->state >= FETCH_FETCHED) {
        fill_wake(ahead);
        return answer_fetched(worker, fetch, &reader); /* unlocks */
    }
    if (!relay_claim(&worker->fastpath->relay, worker->slot)) { /* it waits for its share, and is looked at again */
        pthread_mutex_unlock(&fill->lock);
        fill_wake(ahead);
        return PASS;
    }
    struct waiter *waiter = malloc(sizeof *waiter);
    struct fetch *new = NULL;
    if (waiter && !fetch) {
        struct known known = what_is_known(worker, inode, record->version);
        /* What left the table since this request looked into the index is in the index by now. */
        bool again = known.view && view_holds(known.view, inode, record->version, in->offset, end);
        if (again || fill_is_stuck(fill, owner)) {
            view_end(&worker->view);
            free(waiter);
            if (!again)
                return refuse(worker, request); /* unlocks */
            pthread_mutex_unlock(&fill->lock);
            return AGAIN;
        }
        fetch = new = begin_fetch(worker, record, path, &known, in->offset, end, owner, &ahead);
        view_end(&worker->view);
    }
    if (!waiter || !fetch) {
        pthread_mutex_unlock(&fill->lock);
        fill_wake(ahead);
        free(waiter);
        return PASS;
    }
    *waiter = reader;
    add_waiter(fetch, waiter);
    run_or_wake(worker, fetch, owner, new != NULL, ahead); /* unlocks */
    return TAKEN;
}

bool fill_interrupt(struct fill *fill, uint64_t unique)
{
    if (!fill)
        return false;
    pthread_mutex_lock(&fill->lock);
    struct waiter *waiter = table_take_waiter(&fill->table, unique);
    pthread_mutex_unlock(&fill->lock);
    if (waiter) {
        reply(fill->fastpath->device, unique, EINTR, NULL, 0);
        relay_free_slot(&fill->fastpath->relay, waiter->slot);
        free(waiter);
    }
    return waiter != NULL;
}

static void abandon(struct fill *fill, struct fetch *fetch, struct waiter **late)
{
    while (fetch->waiters) {
        struct waiter *waiter = fetch->waiters;
        fetch->waiters = waiter->next;
        waiter->next = *late;
        *late = waiter;
    }
    table_remove(&fill->table, fetch);
    if (fetch->state == FETCH_FETCHING) { /* its thread finds out when the source answers */
        fetch->state = FETCH_ABANDONED;
        fill_stuck(fill, fetch, true);
        return;
    }
    queue_remove(&fill->queue, fetch);
    if (fetch->cached)
        fill_hold(fill, -(int64_t)fetch->length);
    fetch->references = 1;
    fetch_release(fetch);
}

void fill_tick(struct fill *fill)
{
    if (!fill)
        return;
    uint64_t limit = fill->fastpath->shared->source_timeout_ns;
    struct waiter *late = NULL;
    struct fetch *fetch;
    pthread_mutex_lock(&fill->lock);
    uint64_t now = monotonic_ns(); /* under the lock: no fetch in the table is younger, and none seems to be ages old */
    while ((fetch = table_oldest_unfetched(&fill->table)) && now - fetch->since_ns > limit)
        abandon(fill, fetch, &late);
    pthread_mutex_unlock(&fill->lock);
    while (late) {
        struct waiter *waiter = late;
        late = waiter->next;
        fill->all[0].counters->source_timeouts++; /* before the answer is out, as hits are */
        reply(fill->fastpath->device, waiter->unique, ETIMEDOUT, NULL, 0);
        relay_free_slot(&fill->fastpath->relay, waiter->slot);
        free(waiter);
    }
    append_tick(fill->appender);
}

int fill_start(struct fastpath *fastpath, int blob_fd)
{
    struct shared *shared = fastpath->shared;
    if (!(shared->flags & KEEPS_DATA))
        return 0;
    if (!shared->fetch_threads || shared->threads + FETCH_THREADS(shared) > MAX_THREADS)
        return EINVAL;
    /* Payload comes and goes by the megabyte: keep the memory, and few arenas. New pages cost more than the copy. */
    mallopt(M_ARENA_MAX, 2);
    mallopt(M_MMAP_THRESHOLD, CHUNK_BYTES * 2);
    mallopt(M_TRIM_THRESHOLD, HELD_BYTES);
    struct fill *fill = calloc(1, sizeof *fill);
    if (!fill)
        return ENOMEM;
    fill->fastpath = fastpath;
    shared->stuck = shared->held_bytes = 0; /* of a predecessor that was killed */
    uint32_t most = FETCH_THREADS(shared) + shared->threads - THREADS_FOR_HITS;
    uint32_t reserve = reserved_fetchers(shared), places = most + reserve;
    if (!shares_init(&fill->shares, most, reserve, places) || !shares_init(&fill->stuck_shares, most, reserve, places))
        return ENOMEM;
    wishes_init(&fill->wishes, shared);
    pthread_mutex_init(&fill->lock, NULL);
    fill->appender = append_start(shared, &fastpath->daemon, blob_fd, &fill_append_events, fill);
    if (!fill->appender)
        return ENOMEM;
    int error = fill_start_threads(fill, shared);
    if (error)
        return error;
    fastpath->fill = fill;
    fastpath->appender = fill->appender;
    return 0;
}
