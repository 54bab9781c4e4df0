/* Fetches and the threads that run them. `miss.h` has the READs that wait for one. */
#pragma once

#include <semaphore.h>

#include "appender/append.h"
#include "misses/fetch_table.h"
#include "misses/prefetch_requests.h"
#include "misses/window.h"
#include "worker/fastpath.h"

#define MAX_PATH (32u << 10) /* on the stack; Python serves files with longer paths, and does not cache them */
/* Payload in memory, fetched and not yet appended; beyond that nothing more is cached. A parquet reader asks for 50 MB at once. */
#define MAX_BUFFERED_BYTES (64u << 20)
#define BUFFERED_SHARE 8
/* One owner may have `fetch_threads` of them; the rest is for other owners (shares.h). */
#define FETCH_THREADS(shared) (((shared)->fetch_threads * 4 + 2) / 3)
#define RESERVED_THREADS 28u /* more, for owners that have nearly none; they also replace serving threads that are busy */

struct miss_thread {
    struct misses *misses;
    struct counters *counters;
    struct view view;  /* used by the thread only; initialized before its first prefetch */
    struct fetch *job; /* written under miss_lock: by the thread, or while the thread is idle */
    sem_t wake;
    pthread_t thread;
};

struct misses {
    struct fastpath *fastpath;
    uint32_t thread_count;
    struct fetch_table table GUARDED_BY(miss_lock);
    struct fetch_queue queue GUARDED_BY(miss_lock); /* fetches that wait for a thread */
    struct prefetch_requests prefetch GUARDED_BY(miss_lock);
    size_t buffered_bytes GUARDED_BY(miss_lock); /* payload that is being fetched or waits to be appended */
    uint32_t inline_count GUARDED_BY(miss_lock); /* serving threads that run a fetch themselves */
    struct shares shares GUARDED_BY(miss_lock);  /* of fetches that run */
    struct shares stuck_shares GUARDED_BY(miss_lock);
    uint64_t next_probe_ns GUARDED_BY(miss_lock);
    uint32_t idle_count GUARDED_BY(miss_lock);
    struct miss_thread *idle[MAX_THREADS] GUARDED_BY(miss_lock);
    struct miss_thread all[MAX_THREADS];
};

static inline uint32_t reserved_threads(const struct shared *shared)
{
    uint32_t room = MAX_THREADS - shared->threads - FETCH_THREADS(shared);
    return room < RESERVED_THREADS ? room : RESERVED_THREADS;
}

void answer_waiter(struct misses *misses, const struct waiter *waiter, const struct fetch *fetch);
/* Fetches, answers all waiters, and hands the payload to the appender. */
void run_fetch(struct misses *misses, struct fetch *fetch, struct counters *counters) EXCLUDES(miss_lock);
int miss_threads_start(struct misses *misses, const struct shared *shared) EXCLUDES(miss_lock);
/* Wakes a thread that one of the functions below has returned, after the lock was released. NULL: nothing to do. */
void miss_thread_wake(struct miss_thread *thread) EXCLUDES(miss_lock);
/* The daemon sent prefetch requests. */
void prefetch_requested(struct misses *misses, const struct prefetch_request *requests, size_t count) EXCLUDES(miss_lock);
extern const struct append_events miss_append_events;

/* One fetch more, or one less, that has taken too long and still occupies a thread. */
void count_stuck_locked(struct misses *misses, const struct fetch *fetch, bool more) REQUIRES(miss_lock);
/* Are all threads that this owner may have stuck? */
bool is_stuck_locked(const struct misses *misses, uint32_t owner) REQUIRES(miss_lock);
void count_buffered_locked(struct misses *misses, int64_t bytes) REQUIRES(miss_lock);
/* `prefetch`: no READ asks for it yet, so nothing is evicted for it. */
bool may_cache_locked(struct misses *misses, uint32_t length, bool prefetch) REQUIRES(miss_lock);
/* `cached`: for the blob. Else it is what one READ asks for. `reader`: NULL: no READ asks for it yet. */
struct fetch *add_fetch_locked(struct misses *misses, const struct inode_record *record, uint64_t inode, const char *path,
                               bool cached, uint64_t offset, uint32_t length, const struct waiter *reader)
    REQUIRES(miss_lock);
/* A thread begins to run the fetch. */
void mark_fetching_locked(struct misses *misses, struct fetch *fetch) REQUIRES(miss_lock);
/* Gives the fetch to an idle thread, which must be woken; NULL: the fetch is queued until a thread is idle. */
struct miss_thread *start_fetch_locked(struct misses *misses, struct fetch *fetch) REQUIRES(miss_lock);
/* The same for the first queued fetch that one of its owners may have now. */
struct miss_thread *start_queued_locked(struct misses *misses) REQUIRES(miss_lock);
/* An idle thread, if a prefetch request may be fetched now; it must be woken. */
struct miss_thread *thread_for_prefetch_locked(struct misses *misses) REQUIRES(miss_lock);
