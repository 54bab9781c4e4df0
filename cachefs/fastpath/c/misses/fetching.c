#include "misses/fetching.h"

#include <stdlib.h>

#include "appender/record.h"
#include "cache/age.h"
#include "common/clock.h"
#include "kernel/reply.h"
#include "misses/source.h"
#include "relay/lot.h"
#include "relay/passing.h"

/* Payload that is being fetched or waits to be appended. */
void fill_hold(struct fill *fill, int64_t bytes)
{
    fill->held_bytes += (size_t)bytes;
    fill->fastpath->shared->held_bytes = fill->held_bytes;
}

void fill_stuck(struct fill *fill, const struct fetch *fetch, bool more)
{
    (more ? shares_take : shares_give)(&fill->stuck_shares, fetch->owner);
    fill->fastpath->shared->stuck = fill->stuck_shares.held;
}

bool fill_is_stuck(const struct fill *fill, uint32_t owner)
{
    uint32_t stuck = shares_held(&fill->stuck_shares, owner);
    if (fill->stuck_shares.held >= fill->fetchers)
        return true;
    return stuck && stuck == shares_held(&fill->shares, owner) && shares_full(&fill->shares, owner);
}

void fill_begin(struct fill *fill, struct fetch *fetch)
{
    fetch->state = FETCH_FETCHING;
    shares_take(&fill->shares, fetch->owner);
}

/* Where data are evicted, what waits in memory is a small part of the cache: else memory would be the cache. */
static uint64_t most_held(const struct fill *fill)
{
    const struct shared *shared = fill->fastpath->shared;
    uint64_t share = shared->capacity_bytes / HELD_SHARE;
    return (shared->flags & EVICTS) && share < HELD_BYTES ? share : HELD_BYTES;
}

bool fill_admits(struct fill *fill, uint32_t length, bool ahead)
{
    return (fill->held_bytes + length <= most_held(fill) || !fill->held_bytes) && append_admits(fill->appender, length, ahead);
}

/* A wish is begun while there is room for what it brings, and for what readers need meanwhile. */
static bool has_room(const struct fill *fill)
{
    return fill->held_bytes <= most_held(fill) / 2;
}

struct fetcher *fill_for_wishes(struct fill *fill)
{
    bool now = fill->idle_count && !shares_full(&fill->shares, DAEMON_OWNER) && has_room(fill) && wishes_ready(&fill->wishes, monotonic_ns());
    return now ? fill->idle[--fill->idle_count] : NULL;
}

struct fetch *fill_add(struct fill *fill, const struct inode_record *record, uint64_t inode, const char *path, bool cached,
                       uint64_t offset, uint32_t length, uint32_t owner)
{
    struct fetch *fetch = fetch_new(record, inode, path);
    if (!fetch)
        return NULL;
    fetch->cached = cached;
    fetch->offset = offset;
    fetch->length = length;
    fetch->owner = owner;
    fetch->since_ns = monotonic_ns();
    if (cached)
        fill_hold(fill, length);
    table_add(&fill->table, fetch);
    return fetch;
}

static struct fetcher *give_job(struct fill *fill, struct fetch *fetch)
{
    struct fetcher *fetcher = fill->idle[--fill->idle_count]; /* idle last: its stack is still in the caches */
    fetcher->job = fetch;
    fill_begin(fill, fetch);
    return fetcher;
}

struct fetcher *fill_start_fetch(struct fill *fill, struct fetch *fetch)
{
    if (fill->idle_count && !shares_full(&fill->shares, fetch->owner))
        return give_job(fill, fetch);
    queue_push(&fill->queue, fetch);
    return NULL;
}

struct fetcher *fill_start_queued(struct fill *fill)
{
    struct fetch *fetch = fill->idle_count ? queue_pop_fair(&fill->queue, &fill->shares) : NULL;
    return fetch ? give_job(fill, fetch) : NULL;
}

void fill_wake(struct fetcher *fetcher)
{
    if (fetcher)
        sem_post(&fetcher->wake);
}

/* --- answering ---------------------------------------------------------------------------------------------------- */

void fill_answer(struct fill *fill, const struct waiter *waiter, const struct fetch *fetch)
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
            fill_answer(fill, waiter, fetch);
            latency_note(latencies_of(fill->fastpath->shared, counters), LATENCY_READ_MISS, monotonic_ns() - waiter->since_ns);
            relay_free_slot(&fill->fastpath->relay, waiter->slot);
        } else {
            if (!relay_pass(&fill->fastpath->relay, waiter->slot)) /* Python sees for itself what is wrong */
                relay_free_slot(&fill->fastpath->relay, waiter->slot);
        }
        free(waiter);
    }
}

void fill_run(struct fill *fill, struct fetch *fetch, struct counters *counters)
{
    const struct fastpath *fastpath = fill->fastpath;
    uint64_t begun_ns = monotonic_ns();
    fetch->payload = source_read(fastpath->shared, fastpath->source, fetch->path, &fetch->record, fetch->offset,
                                 fetch->length, counters);
    bool good = fetch->payload != NULL;
    uint64_t now_ns = monotonic_ns();
    pthread_mutex_lock(&fill->lock);
    struct waiter *waiters = fetch->waiters;
    if (good && fetch->young && waiters) { /* before the kernel has them */
        good = young_note(fastpath->shared, fetch->inode, &fetch->record);
        counters->young_reads += good;
    }
    if (waiters && fetch->length <= QUICK_READ_BYTES)
        wishes_missed(&fill->wishes, now_ns, now_ns - begun_ns);
    fetch->waiters = NULL;
    bool abandoned = fetch->state == FETCH_ABANDONED;
    shares_give(&fill->shares, fetch->owner);
    struct fetcher *next = fill_start_queued(fill); /* its owner may have one more, and a thread that is idle may be for that */
    if (abandoned) {
        fill_stuck(fill, fetch, false);
    } else {
        fetch->state = FETCH_FETCHED;
        if (!good || !fetch->cached) /* nobody else will find it */
            table_remove(&fill->table, fetch);
    }
    bool append = good && fetch->cached && !abandoned;
    if (!append && fetch->cached)
        fill_hold(fill, -(int64_t)fetch->length);
    fetch->references = 1;
    pthread_mutex_unlock(&fill->lock);
    fill_wake(next);

    finish_waiters(fill, waiters, fetch, good, counters);
    if (append && append_queue(fill->appender, fetch))
        return; /* `appended` comes next */
    pthread_mutex_lock(&fill->lock);
    if (append) {
        fill_hold(fill, -(int64_t)fetch->length);
        table_remove(&fill->table, fetch);
        counters->skipped_admissions++;
    }
    fetch_release(fetch);
    pthread_mutex_unlock(&fill->lock);
}

/* The wish's unit, being fetched. NULL: nothing is to be done, or nothing can be. */
static struct fetch *begin_wish(struct fetcher *fetcher, const struct wish *wish)
{
    struct fill *fill = fetcher->fill;
    struct view *view = &fetcher->view;
    struct inode_record record;
    struct fetch *fetch = NULL;
    uint64_t start;
    uint32_t unit;
    char path[MAX_PATH];
    if (!fill->fastpath->shared->serving || (!view->index && view_init(view, &fill->fastpath->index)) || view_begin(view))
        return NULL;
    bool wanted = view_inode(view, wish->inode, &record) && !(record.flags & (STALE | UNLINKED)) &&
                  remaining_ns(view, &record) && is_immutable(view, &record) && wish->offset < record.size &&
                  !is_young(fill->fastpath->shared, &record);
    wanted = wanted && view_path(view, wish->inode, path, sizeof path);
    view_end(view);
    if (!wanted)
        return NULL;
    unit_of(fill->fastpath->shared, record.size, wish->offset, &start, &unit);
    pthread_mutex_lock(&fill->lock);
    struct known known = {&fill->table, view_begin(view) ? NULL : view, wish->inode, record.version};
    if (known_until(&known, start, start + unit) < start + unit && fill_admits(fill, unit, true))
        fetch = fill_add(fill, &record, wish->inode, path, true, start, unit, DAEMON_OWNER);
    view_end(view);
    if (fetch)
        fill_begin(fill, fetch);
    pthread_mutex_unlock(&fill->lock);
    return fetch;
}

static void fulfil(struct fetcher *fetcher, const struct wish *wish)
{
    struct fill *fill = fetcher->fill;
    struct fetch *fetch = begin_wish(fetcher, wish);
    if (fetch) {
        fill_run(fill, fetch, fetcher->counters);
        fetcher->counters->prefetched++;
    }
    pthread_mutex_lock(&fill->lock);
    wishes_end(&fill->wishes);
    fill->fastpath->shared->wishes_done++;
    struct fetcher *another = fill_for_wishes(fill); /* the limit may have grown */
    pthread_mutex_unlock(&fill->lock);
    fill_wake(another);
}

static void *run_fetcher(void *context)
{
    struct fetcher *fetcher = context;
    struct fill *fill = fetcher->fill;
    for (;;) {
        while (sem_wait(&fetcher->wake))
            ;
        for (bool idle = false; !idle;) {
            struct wish wish;
            if (fetcher->job)
                fill_run(fill, fetcher->job, fetcher->counters);
            pthread_mutex_lock(&fill->lock);
            fetcher->job = queue_pop_fair(&fill->queue, &fill->shares);
            bool may_wish = !fetcher->job && !shares_full(&fill->shares, DAEMON_OWNER);
            bool wished = may_wish && has_room(fill) && wishes_begin(&fill->wishes, monotonic_ns(), &wish);
            idle = !fetcher->job && !wished;
            if (fetcher->job)
                fill_begin(fill, fetcher->job);
            else if (idle)
                fill->idle[fill->idle_count++] = fetcher;
            pthread_mutex_unlock(&fill->lock);
            if (wished)
                fulfil(fetcher, &wish);
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
    fill_hold(fill, -(int64_t)fetch->length);
    if (extent) {
        fetch->extent = *extent;
        fetch->report = number;
        fetch->state = FETCH_APPENDED;
        table_settle_later(&fill->table, fetch);
    } else {
        table_remove(&fill->table, fetch);
    }
    fetch_release(fetch);
    struct fetcher *fetcher = fill_for_wishes(fill);
    pthread_mutex_unlock(&fill->lock);
    fill_wake(fetcher);
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

const struct append_events fill_append_events = {appended, settled, tell_again};

/* --- wishes ------------------------------------------------------------------------------------------------------- */

void fill_wish(struct fill *fill, const struct wish *wishes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct fetcher *fetcher = NULL;
        pthread_mutex_lock(&fill->lock);
        if (!wishes_add(&fill->wishes, &wishes[i]))
            fill->fastpath->shared->wishes_done++;
        else
            fetcher = fill_for_wishes(fill);
        pthread_mutex_unlock(&fill->lock);
        fill_wake(fetcher);
    }
}

int fill_start_threads(struct fill *fill, const struct shared *shared)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128u << 10);
    for (uint32_t i = 0; i < FETCH_THREADS(shared) + reserved_fetchers(shared); i++) {
        struct fetcher *fetcher = &fill->all[i];
        *fetcher = (struct fetcher){.fill = fill, .counters = &fill->fastpath->shared->counters[shared->threads + i]};
        sem_init(&fetcher->wake, 0, 0);
        fill->idle[fill->idle_count++] = fetcher;
        int error = pthread_create(&fetcher->thread, &attributes, run_fetcher, fetcher);
        if (error)
            return error;
        fill->fetchers++;
    }
    return 0;
}
