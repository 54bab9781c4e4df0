#include "misses/miss_threads.h"

#include <stdlib.h>

#include "appender/record.h"
#include "cache/age.h"
#include "common/assertion.h"
#include "kernel/reply.h"
#include "misses/source.h"
#include "relay/lot.h"
#include "relay/passing.h"

struct lock miss_lock = LOCK_INIT;

void count_buffered_locked(struct misses *misses, int64_t bytes)
{
    ASSERT(bytes >= 0 || misses->buffered_bytes >= (size_t)-bytes);
    misses->buffered_bytes += (size_t)bytes;
    misses->fastpath->shared->buffered_bytes = misses->buffered_bytes;
}

void count_stuck_locked(struct misses *misses, const struct fetch *fetch, bool more)
{
    (more ? shares_take : shares_give)(&misses->stuck_shares, fetch->owner);
    misses->fastpath->shared->stuck = misses->stuck_shares.taken;
}

bool is_stuck_locked(const struct misses *misses, uint32_t owner)
{
    uint32_t stuck = shares_taken(&misses->stuck_shares, owner);
    if (misses->stuck_shares.taken >= misses->thread_count)
        return true;
    return stuck && stuck == shares_taken(&misses->shares, owner) && shares_full(&misses->shares, owner);
}

void mark_fetching_locked(struct misses *misses, struct fetch *fetch)
{
    ASSERT(fetch->state == FETCH_QUEUED);
    fetch->state = FETCH_FETCHING;
    shares_take(&misses->shares, fetch->owner);
}

/* Where data are evicted, the payload in memory is a small part of the capacity: else memory would be the cache. */
static uint64_t max_buffered_bytes(const struct misses *misses)
{
    const struct shared *shared = misses->fastpath->shared;
    uint64_t share = shared->capacity_bytes / BUFFERED_SHARE;
    return (shared->flags & EVICTS) && share < MAX_BUFFERED_BYTES ? share : MAX_BUFFERED_BYTES;
}

bool may_cache_locked(struct misses *misses, uint32_t length, bool prefetch)
{
    bool fits = misses->buffered_bytes + length <= max_buffered_bytes(misses) || !misses->buffered_bytes;
    return fits && append_admits(misses->fastpath->appender, length, prefetch);
}

/* A prefetch request is begun while there is room for its payload and for what readers need meanwhile. */
static bool has_room_locked(const struct misses *misses) REQUIRES(miss_lock)
{
    return misses->buffered_bytes <= max_buffered_bytes(misses) / 2;
}

struct miss_thread *thread_for_prefetch_locked(struct misses *misses)
{
    bool now = misses->idle_count && !shares_full(&misses->shares, DAEMON_OWNER) && has_room_locked(misses) &&
               prefetch_ready_locked(&misses->prefetch, monotonic_ns());
    return now ? misses->idle[--misses->idle_count] : NULL;
}

struct fetch *add_fetch_locked(struct misses *misses, const struct inode_record *record, uint64_t inode, const char *path,
                               bool cached, uint64_t offset, uint32_t length, const struct waiter *reader)
{
    struct fetch *fetch = fetch_new(record, inode, path);
    if (!fetch)
        return NULL;
    fetch->cached = cached;
    fetch->offset = offset;
    fetch->length = length;
    fetch->owner = reader ? reader->owner : DAEMON_OWNER;
    fetch->reader = reader ? reader->owner : 0;
    fetch->reader_group = reader ? reader->group : 0;
    fetch->since_ns = monotonic_ns();
    if (cached)
        count_buffered_locked(misses, length);
    add_to_table_locked(&misses->table, fetch);
    return fetch;
}

static struct miss_thread *give_job_locked(struct misses *misses, struct fetch *fetch) REQUIRES(miss_lock)
{
    ASSERT(misses->idle_count > 0);
    struct miss_thread *thread = misses->idle[--misses->idle_count]; /* idle last: its stack is still in the CPU's caches */
    thread->job = fetch;
    mark_fetching_locked(misses, fetch);
    return thread;
}

struct miss_thread *start_fetch_locked(struct misses *misses, struct fetch *fetch)
{
    if (misses->idle_count && !shares_full(&misses->shares, fetch->owner))
        return give_job_locked(misses, fetch);
    queue_push(&misses->queue, fetch);
    return NULL;
}

struct miss_thread *start_queued_locked(struct misses *misses)
{
    struct fetch *fetch = misses->idle_count ? queue_pop_fair_locked(&misses->queue, &misses->shares) : NULL;
    return fetch ? give_job_locked(misses, fetch) : NULL;
}

void miss_thread_wake(struct miss_thread *thread)
{
    if (thread)
        sem_post(&thread->wake);
}

/* --- answering ---------------------------------------------------------------------------------------------------- */

void answer_waiter(struct misses *misses, const struct waiter *waiter, const struct fetch *fetch)
{
    ASSERT(waiter->offset >= fetch->offset && waiter->offset + waiter->length <= fetch->offset + fetch->length);
    reply(misses->fastpath->device, waiter->unique, 0, fetch->payload + (waiter->offset - fetch->offset), waiter->length);
}

static void finish_waiters(struct misses *misses, struct waiter *waiters, const struct fetch *fetch, bool good,
                           struct counters *counters)
{
    while (waiters) {
        struct waiter *waiter = waiters;
        waiters = waiter->next;
        if (good) {
            counters->misses++;
            counters->miss_bytes += waiter->length;
            answer_waiter(misses, waiter, fetch);
            latency_note(misses->fastpath->shared, counters, LATENCY_READ_MISS, monotonic_ns() - waiter->since_ns);
            relay_free_slot(&misses->fastpath->relay, waiter->slot);
        } else if (!relay_pass(&misses->fastpath->relay, waiter->slot)) { /* Python finds out what is wrong */
            relay_free_slot(&misses->fastpath->relay, waiter->slot);
        }
        free(waiter);
    }
}

void run_fetch(struct misses *misses, struct fetch *fetch, struct counters *counters)
{
    const struct fastpath *fastpath = misses->fastpath;
    uint64_t begun_ns = monotonic_ns();
    fetch->payload = source_read(fastpath->shared, fastpath->source, fetch->path, &fetch->record, fetch->offset,
                                 fetch->length, fetch->reader, fetch->reader_group, counters);
    bool good = fetch->payload != NULL;
    uint64_t now_ns = monotonic_ns();
    lock_take(&miss_lock);
    ASSERT(fetch->state == FETCH_FETCHING || fetch->state == FETCH_ABANDONED);
    struct waiter *waiters = fetch->waiters;
    if (good && fetch->young && waiters) { /* before the kernel has the data */
        good = young_note(fastpath->shared, fetch->inode, &fetch->record);
        counters->young_reads += good;
    }
    if (waiters && fetch->length <= QUICK_READ_BYTES)
        prefetch_missed_locked(&misses->prefetch, now_ns, now_ns - begun_ns);
    fetch->waiters = NULL;
    bool abandoned = fetch->state == FETCH_ABANDONED;
    shares_give(&misses->shares, fetch->owner);
    struct miss_thread *next = start_queued_locked(misses); /* its owner may have one more now */
    if (abandoned) {
        count_stuck_locked(misses, fetch, false);
    } else {
        fetch->state = FETCH_FETCHED;
        if (!good || !fetch->cached) /* no other READ may find it */
            remove_from_table_locked(&misses->table, fetch);
    }
    bool append = good && fetch->cached && !abandoned;
    if (!append && fetch->cached)
        count_buffered_locked(misses, -(int64_t)fetch->length);
    fetch->references = 1;
    lock_release(&miss_lock);
    miss_thread_wake(next);

    finish_waiters(misses, waiters, fetch, good, counters);
    if (append && append_queue(fastpath->appender, fetch))
        return; /* the appender calls `appended` next */
    lock_take(&miss_lock);
    if (append) {
        count_buffered_locked(misses, -(int64_t)fetch->length);
        remove_from_table_locked(&misses->table, fetch);
        counters->skipped_admissions++;
    }
    fetch_release_locked(fetch);
    lock_release(&miss_lock);
}

/* Begins the fetch of a prefetch request's unit. NULL: it is cached already, or cannot be cached now. */
static struct fetch *begin_prefetch(struct miss_thread *thread, const struct prefetch_request *request)
{
    struct misses *misses = thread->misses;
    struct view *view = &thread->view;
    struct inode_record record;
    struct fetch *fetch = NULL;
    uint64_t start;
    uint32_t unit;
    char path[MAX_PATH];
    if (!misses->fastpath->shared->serving || (!view->index && view_init(view, &misses->fastpath->index)) || view_begin(view))
        return NULL;
    bool wanted = view_inode(view, request->inode, &record) && !(record.flags & (STALE | UNLINKED)) &&
                  remaining_ns(view, &record) && is_immutable(view, &record) && request->offset < record.size &&
                  !(record.flags & YOUNG) && view_path(view, request->inode, path, sizeof path);
    view_end(view);
    if (!wanted)
        return NULL;
    unit_of(misses->fastpath->shared, record.size, request->offset, &start, &unit);
    lock_take(&miss_lock);
    struct known known = {&misses->table, view_begin(view) ? NULL : view, request->inode, record.version};
    if (known_until_locked(&known, start, start + unit) < start + unit && may_cache_locked(misses, unit, true))
        fetch = add_fetch_locked(misses, &record, request->inode, path, true, start, unit, NULL);
    view_end(view);
    if (fetch)
        mark_fetching_locked(misses, fetch);
    lock_release(&miss_lock);
    return fetch;
}

static void prefetch(struct miss_thread *thread, const struct prefetch_request *request)
{
    struct misses *misses = thread->misses;
    struct fetch *fetch = begin_prefetch(thread, request);
    if (fetch) {
        run_fetch(misses, fetch, thread->counters);
        thread->counters->prefetched++;
    }
    lock_take(&miss_lock);
    ASSERT(misses->prefetch.active > 0);
    misses->prefetch.active--;
    misses->fastpath->shared->prefetch_done++;
    struct miss_thread *another = thread_for_prefetch_locked(misses); /* the limit may have grown */
    lock_release(&miss_lock);
    miss_thread_wake(another);
}

static void *run_miss_thread(void *context)
{
    struct miss_thread *thread = context;
    struct misses *misses = thread->misses;
    for (;;) {
        while (sem_wait(&thread->wake))
            ;
        for (bool idle = false; !idle;) {
            struct prefetch_request request;
            if (thread->job)
                run_fetch(misses, thread->job, thread->counters);
            lock_take(&miss_lock);
            thread->job = queue_pop_fair_locked(&misses->queue, &misses->shares);
            bool prefetches = !thread->job && !shares_full(&misses->shares, DAEMON_OWNER) && has_room_locked(misses) &&
                              prefetch_next_locked(&misses->prefetch, monotonic_ns(), &request);
            idle = !thread->job && !prefetches;
            if (thread->job)
                mark_fetching_locked(misses, thread->job);
            else if (idle)
                misses->idle[misses->idle_count++] = thread;
            lock_release(&miss_lock);
            if (prefetches)
                prefetch(thread, &request);
        }
    }
    return NULL;
}

/* --- calls of the appender ---------------------------------------------------------------------------------------- */

/* The fetch is in the blob (`extent` says where), or will never be. */
static void appended(void *context, struct fetch *fetch, const struct extent *extent, uint64_t number)
{
    struct misses *misses = context;
    lock_take(&miss_lock);
    count_buffered_locked(misses, -(int64_t)fetch->length);
    ASSERT(fetch->state == FETCH_FETCHED && fetch->in_table);
    if (extent) {
        fetch->extent = *extent;
        fetch->report = number;
        fetch->state = FETCH_APPENDED;
        add_pending_locked(&misses->table, fetch);
    } else {
        remove_from_table_locked(&misses->table, fetch);
    }
    fetch_release_locked(fetch);
    struct miss_thread *thread = thread_for_prefetch_locked(misses);
    lock_release(&miss_lock);
    miss_thread_wake(thread);
}

/* Reports again what was reported to a daemon that died and may not have been committed. */
static void report_again(void *context)
{
    struct misses *misses = context;
    uint8_t message[REPORTS_BYTES];
    uint64_t last = 0;
    struct fetch *rest;
    do {
        uint32_t used = 0;
        lock_take(&miss_lock);
        for (rest = misses->table.pending.first; rest && used + MAX_REPORT_BYTES <= sizeof message; rest = rest->queue_next)
            if (rest->report > last) {
                used += encode_report(message + used, rest, &rest->extent, rest->report);
                last = rest->report;
            }
        lock_release(&miss_lock);
        if (used && !append_send(misses->fastpath->appender, CONTROL_FILLED, message, used))
            return;
    } while (rest);
}

const struct append_events miss_append_events = {appended, report_again};

/* --- prefetch requests -------------------------------------------------------------------------------------------- */

void prefetch_requested(struct misses *misses, const struct prefetch_request *requests, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct miss_thread *thread = NULL;
        lock_take(&miss_lock);
        if (!prefetch_add_locked(&misses->prefetch, &requests[i]))
            misses->fastpath->shared->prefetch_done++;
        else
            thread = thread_for_prefetch_locked(misses);
        lock_release(&miss_lock);
        miss_thread_wake(thread);
    }
}

int miss_threads_start(struct misses *misses, const struct shared *shared)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128u << 10);
    ASSERT(FETCH_THREADS(shared) + reserved_threads(shared) + shared->threads <= MAX_THREADS);
    for (uint32_t i = 0; i < FETCH_THREADS(shared) + reserved_threads(shared); i++) {
        struct miss_thread *thread = &misses->all[i];
        *thread = (struct miss_thread){.misses = misses, .counters = &misses->fastpath->shared->counters[shared->threads + i]};
        sem_init(&thread->wake, 0, 0);
        lock_take(&miss_lock);
        misses->idle[misses->idle_count++] = thread;
        lock_release(&miss_lock);
        int error = pthread_create(&thread->thread, &attributes, run_miss_thread, thread);
        if (error)
            return error;
        misses->thread_count++;
    }
    return 0;
}
