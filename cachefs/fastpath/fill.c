#include "fill.h"

#include <errno.h>
#include <malloc.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "append.h"
#include "fill_table.h"
#include "source.h"

#define MAX_PATH 4000 /* the kernel's 4,096 and a margin; longer ones are walked by Python */
#define HELD_BYTES (16u << 20) /* fetched and not yet appended; beyond that nothing more is cached */
#define THREADS_FOR_HITS 4 /* are never lent to the source, which may hang */
#define PROBE_NS 1000000000u

struct fetcher {
    struct fill *fill;
    struct counters *counters;
    struct fetch *job;
    sem_t wake;
    pthread_t thread;
};

struct fill {
    struct fastpath *fastpath;
    struct appender *appender;
    pthread_mutex_t lock;
    struct fill_table table;
    struct fetch_queue queue; /* wait for a thread */
    size_t held_bytes;
    uint32_t fetchers, idle_count, stuck, inline_count;
    uint64_t next_probe_ns;
    struct fetcher *idle[MAX_THREADS];
    struct fetcher all[MAX_THREADS];
};

/* Payload that is being fetched or waits to be appended. */
static void hold(struct fill *fill, int64_t bytes)
{
    fill->held_bytes += (size_t)bytes;
    fill->fastpath->shared->held_bytes = fill->held_bytes;
}

static void set_stuck(struct fill *fill, uint32_t stuck)
{
    fill->fastpath->shared->stuck = fill->stuck = stuck;
}

/* --- answering ---------------------------------------------------------------------------------------------------- */

static void answer_waiter(struct fill *fill, const struct waiter *waiter, const struct fetch *fetch)
{
    reply(fill->fastpath->device, waiter->unique, 0, fetch->payload + (waiter->offset - fetch->offset), waiter->length);
}

static void finish_waiters(struct fill *fill, struct waiter *waiters, const struct fetch *fetch, bool good,
                           struct counters *counters)
{
    while (waiters) {
        struct waiter *waiter = waiters;
        waiters = waiter->next;
        if (good) {
            counters->misses++;
            counters->miss_bytes += waiter->length;
            answer_waiter(fill, waiter, fetch);
            relay_free_slot(&fill->fastpath->relay, waiter->slot);
        } else {
            relay_pass(&fill->fastpath->relay, waiter->slot); /* Python sees for itself what is wrong */
        }
        free(waiter);
    }
}

static void run_fetch(struct fill *fill, struct fetch *fetch, struct counters *counters)
{
    const struct fastpath *fastpath = fill->fastpath;
    fetch->payload = source_read(fastpath->shared, fastpath->source, fetch->path, &fetch->record, fetch->offset,
                                 fetch->length, counters);
    bool good = fetch->payload != NULL;
    pthread_mutex_lock(&fill->lock);
    struct waiter *waiters = fetch->waiters;
    fetch->waiters = NULL;
    bool abandoned = fetch->state == FETCH_ABANDONED;
    if (abandoned) {
        set_stuck(fill, fill->stuck - 1);
    } else {
        fetch->state = FETCH_FETCHED;
        if (!good || !fetch->cached) /* nobody else will find it */
            table_remove(&fill->table, fetch);
    }
    bool append = good && fetch->cached && !abandoned;
    if (!append && fetch->cached)
        hold(fill, -(int64_t)fetch->length);
    fetch->references = 1;
    pthread_mutex_unlock(&fill->lock);

    finish_waiters(fill, waiters, fetch, good, counters);
    if (append && append_queue(fill->appender, fetch))
        return; /* `appended` comes next */
    pthread_mutex_lock(&fill->lock);
    if (append) {
        hold(fill, -(int64_t)fetch->length);
        table_remove(&fill->table, fetch);
        counters->skipped_admissions++;
    }
    fetch_release(fetch);
    pthread_mutex_unlock(&fill->lock);
}

static void *run_fetcher(void *context)
{
    struct fetcher *fetcher = context;
    struct fill *fill = fetcher->fill;
    for (;;) {
        while (sem_wait(&fetcher->wake))
            ;
        while (fetcher->job) {
            run_fetch(fill, fetcher->job, fetcher->counters);
            pthread_mutex_lock(&fill->lock);
            fetcher->job = queue_pop(&fill->queue);
            if (fetcher->job)
                fetcher->job->state = FETCH_FETCHING;
            else
                fill->idle[fill->idle_count++] = fetcher;
            pthread_mutex_unlock(&fill->lock);
        }
    }
    return NULL;
}

/* --- the appender's side ------------------------------------------------------------------------------------------ */

/* It is in the blob (`extent` says where), or will never be. Called by the appender. */
static void appended(void *context, struct fetch *fetch, const struct extent *extent, uint64_t number)
{
    struct fill *fill = context;
    pthread_mutex_lock(&fill->lock);
    hold(fill, -(int64_t)fetch->length);
    if (extent) {
        fetch->extent = *extent;
        fetch->report = number;
        fetch->state = FETCH_APPENDED;
        table_settle_later(&fill->table, fetch);
    } else {
        table_remove(&fill->table, fetch);
    }
    fetch_release(fetch);
    pthread_mutex_unlock(&fill->lock);
}

/* Reports up to `number` are in the index, or never will be. Called by the appender. */
static void settled(void *context, uint64_t number)
{
    struct fill *fill = context;
    pthread_mutex_lock(&fill->lock);
    table_settle(&fill->table, number);
    pthread_mutex_unlock(&fill->lock);
}

/* What was reported to a daemon that died and may not have been committed. Called by the appender. */
static void tell_again(void *context)
{
    struct fill *fill = context;
    uint8_t message[REPORTS_BYTES];
    uint64_t told = 0;
    struct fetch *rest;
    do {
        uint32_t used = 0;
        pthread_mutex_lock(&fill->lock);
        for (rest = fill->table.settle_first; rest && used + MAX_REPORT_BYTES <= sizeof message; rest = rest->settle_next)
            if (rest->report > told) {
                used += encode_report(message + used, rest, &rest->extent, rest->report);
                told = rest->report;
            }
        pthread_mutex_unlock(&fill->lock);
        if (used && !append_tell(fill->appender, message, used))
            return;
    } while (rest);
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

static bool admits(struct fill *fill, uint32_t length)
{
    return fill->held_bytes + length <= HELD_BYTES && append_admits(fill->appender, length);
}

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
        answer_waiter(fill, waiter, fetch);
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
            reply(fill->fastpath->device, waiter->unique, 0, data, waiter->length);
        }
        if (buffer && buffer != worker->scratch)
            buffer_give(buffer);
        if (!data)
            return PASS;
    }
    return ANSWERED;
}

static bool indexed_by_now(struct worker *worker, uint64_t inode, uint64_t version, uint64_t start)
{
    struct extent extent;
    bool found = !view_begin(&worker->view) && view_extent(&worker->view, inode, start, &extent) &&
                 extent.record.version == version && !worker->distrusts;
    view_end(&worker->view);
    return found;
}

/* The caller holds the lock. Who is to run it: a thread that must be woken, or NULL if all are busy and will come to it. */
static struct fetcher *start_locked(struct fill *fill, struct fetch *fetch)
{
    if (fill->idle_count) {
        struct fetcher *fetcher = fill->idle[--fill->idle_count]; /* idle last: its stack is still in the caches */
        fetcher->job = fetch;
        fetch->state = FETCH_FETCHING;
        return fetcher;
    }
    queue_push(&fill->queue, fetch);
    return NULL;
}

/* `cached`: a whole unit, for the blob. Else what one READ asks for. */
static struct fetch *add_locked(struct fill *fill, const struct inode_record *record, uint64_t inode, const char *path,
                                bool cached, uint64_t offset, uint32_t length)
{
    struct fetch *fetch = fetch_new(record, inode, path);
    if (!fetch)
        return NULL;
    fetch->cached = cached;
    fetch->offset = offset;
    fetch->length = length;
    fetch->since_ns = monotonic_ns();
    if (cached)
        hold(fill, length);
    table_add(&fill->table, fetch);
    return fetch;
}

/* The first READ of a chunk, of a file whose chunk before that is known: somebody reads on and on. The next one is fetched
 * meanwhile, as the kernel would have done for a direct reader. */
static struct fetcher *read_ahead_locked(struct worker *worker, const struct inode_record *record, uint64_t inode,
                                         const char *path, uint64_t start)
{
    struct fill *fill = worker->fastpath->fill;
    uint64_t next, version = record->version;
    uint32_t length;
    if (start < CHUNK_BYTES || start + CHUNK_BYTES >= record->size || !fill->idle_count)
        return NULL;
    unit_of(fill->fastpath->shared, record->size, start + CHUNK_BYTES, &next, &length);
    bool sequential = table_find(&fill->table, inode, version, start - CHUNK_BYTES) ||
                      indexed_by_now(worker, inode, version, start - CHUNK_BYTES);
    if (!sequential || !admits(fill, length) || table_find(&fill->table, inode, version, next) ||
        indexed_by_now(worker, inode, version, next))
        return NULL;
    struct fetch *fetch = add_locked(fill, record, inode, path, true, next, length);
    return fetch ? start_locked(fill, fetch) : NULL;
}

static void wake(struct fetcher *fetcher)
{
    if (fetcher)
        sem_post(&fetcher->wake);
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
    reply(fill->fastpath->device, request->header->unique, ETIMEDOUT, NULL, 0);
    worker->counters->source_timeouts++;
    return ANSWERED;
}

enum outcome fill_read(struct worker *worker, const struct inode_record *record, const struct request *request)
{
    struct fill *fill = worker->fastpath->fill;
    const struct shared *shared = worker->fastpath->shared;
    const struct fuse_read_in *in = request->body;
    uint64_t inode = request->header->nodeid, start, end = in->offset + in->size;
    uint32_t unit;
    char path[MAX_PATH];
    if (!fill || (record->flags & (STALE | UNLINKED)) || !view_path(&worker->view, inode, path, sizeof path))
        return PASS;
    view_end(&worker->view);
    if (end > record->size)
        end = record->size;
    unit_of(shared, record->size, in->offset, &start, &unit);
    bool within = end <= start + unit;
    struct waiter reader = {
        .slot = worker->slot, .unique = request->header->unique, .offset = in->offset, .length = (uint32_t)(end - in->offset)};

    pthread_mutex_lock(&fill->lock);
    struct fetch *fetch = within ? table_find(&fill->table, inode, record->version, start) : NULL;
    struct fetcher *ahead = NULL;
    if (within && !(fetch && fetch->touched))
        ahead = read_ahead_locked(worker, record, inode, path, start);
    if (fetch)
        fetch->touched = true;
    if (fetch && fetch->state >= FETCH_FETCHED) {
        wake(ahead);
        return answer_fetched(worker, fetch, &reader); /* unlocks */
    }
    /* What left the table since this request looked into the index is in the index by now. */
    if (!fetch && within && indexed_by_now(worker, inode, record->version, start)) {
        pthread_mutex_unlock(&fill->lock);
        wake(ahead);
        return AGAIN;
    }
    if (!fetch && fill->stuck >= fill->fetchers)
        return refuse(worker, request); /* unlocks */
    struct waiter *waiter = malloc(sizeof *waiter);
    struct fetch *new = NULL;
    if (waiter && !fetch) {
        bool cached = within && admits(fill, unit);
        worker->counters->skipped_admissions += !cached;
        fetch = new = add_locked(fill, record, inode, path, cached, cached ? start : in->offset, cached ? unit : reader.length);
    }
    if (!waiter || !fetch) {
        pthread_mutex_unlock(&fill->lock);
        wake(ahead);
        free(waiter);
        return PASS;
    }
    *waiter = reader;
    add_waiter(fetch, waiter);
    /* Most serving threads may fetch themselves: that saves a wake-up. The others are there for hits. */
    bool ourselves = new && fill->inline_count + THREADS_FOR_HITS < shared->threads;
    struct fetcher *fetcher = NULL;
    if (ourselves) {
        fill->inline_count++;
        fetch->state = FETCH_FETCHING;
    } else if (new) {
        fetcher = start_locked(fill, fetch);
    }
    if (new)
        fetch->touched = true;
    pthread_mutex_unlock(&fill->lock);
    wake(ahead);
    wake(fetcher);
    if (ourselves) {
        give_turn(worker);
        run_fetch(fill, fetch, worker->counters);
        pthread_mutex_lock(&fill->lock);
        fill->inline_count--;
        pthread_mutex_unlock(&fill->lock);
    }
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

void fill_slab(struct fill *fill, uint64_t offset)
{
    if (fill)
        append_slab(fill->appender, offset);
}

void fill_attached(struct fill *fill, bool same)
{
    if (!fill)
        return;
    append_attached(fill->appender, same);
}

void fill_drain(struct fill *fill)
{
    if (fill)
        append_drain(fill->appender);
}

void fill_daemon_gone(struct fill *fill)
{
    if (fill)
        append_daemon_gone(fill->appender);
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
        set_stuck(fill, fill->stuck + 1);
        return;
    }
    queue_remove(&fill->queue, fetch);
    if (fetch->cached)
        hold(fill, -(int64_t)fetch->length);
    fetch->references = 1;
    fetch_release(fetch);
}

void fill_tick(struct fill *fill)
{
    if (!fill)
        return;
    uint64_t limit = fill->fastpath->shared->source_timeout_ns, now = monotonic_ns();
    struct waiter *late = NULL;
    struct fetch *fetch;
    pthread_mutex_lock(&fill->lock);
    while ((fetch = table_oldest_unfetched(&fill->table)) && now - fetch->since_ns > limit)
        abandon(fill, fetch, &late);
    pthread_mutex_unlock(&fill->lock);
    while (late) {
        struct waiter *waiter = late;
        late = waiter->next;
        reply(fill->fastpath->device, waiter->unique, ETIMEDOUT, NULL, 0);
        relay_free_slot(&fill->fastpath->relay, waiter->slot);
        fill->all[0].counters->source_timeouts++;
        free(waiter);
    }
    append_tick(fill->appender);
}

int fill_start(struct fastpath *fastpath, struct control_socket *control)
{
    struct shared *shared = fastpath->shared;
    if (!(shared->flags & KEEPS_DATA))
        return 0;
    if (!shared->fetch_threads || shared->threads + shared->fetch_threads > MAX_THREADS)
        return EINVAL;
    /* Payload comes and goes by the megabyte: keep the memory, and few arenas. New pages cost more than the copy. */
    mallopt(M_ARENA_MAX, 2);
    mallopt(M_MMAP_THRESHOLD, CHUNK_BYTES * 2);
    mallopt(M_TRIM_THRESHOLD, 2 * HELD_BYTES);
    struct fill *fill = calloc(1, sizeof *fill);
    if (!fill)
        return ENOMEM;
    fill->fastpath = fastpath;
    set_stuck(fill, 0);
    pthread_mutex_init(&fill->lock, NULL);
    static const struct append_events events = {appended, settled, tell_again};
    fill->appender = append_start(shared, control, control->blob_fd, &events, fill);
    if (!fill->appender)
        return ENOMEM;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128u << 10);
    for (uint32_t i = 0; i < shared->fetch_threads; i++) {
        struct fetcher *fetcher = &fill->all[i];
        *fetcher = (struct fetcher){.fill = fill, .counters = &shared->counters[shared->threads + i]};
        sem_init(&fetcher->wake, 0, 0);
        fill->idle[fill->idle_count++] = fetcher;
        int error = pthread_create(&fetcher->thread, &attributes, run_fetcher, fetcher);
        if (error)
            return error;
        fill->fetchers++;
    }
    fastpath->fill = fill;
    return 0;
}
