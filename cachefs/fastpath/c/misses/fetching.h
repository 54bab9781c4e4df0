/* Fetches and the threads that make them. `fill.h` has the READs that wait for one. */
#pragma once

#include <pthread.h>
#include <semaphore.h>

#include "appender/append.h"
#include "misses/fill_table.h"
#include "misses/window.h"
#include "misses/wishes.h"
#include "worker/fastpath.h"

#define MAX_PATH (32u << 10) /* on the stack; files beneath longer ones are Python's, and are not cached */
/* Fetched and not yet appended; beyond that nothing more is cached. A parquet reader asks for 50 MB at once. */
#define HELD_BYTES (64u << 20)
#define HELD_SHARE 8
/* As many as were asked for, for one owner; the rest is for others (shares.h). */
#define FETCH_THREADS(shared) (((shared)->fetch_threads * 4 + 2) / 3)
#define RESERVED_FETCHERS 28u /* more, for owners that have next to nothing; they stand in for serving threads that are busy, too */

struct fetcher {
    struct fill *fill;
    struct view view; /* begun when it first fetches a wish */
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
    struct wishes wishes;
    size_t held_bytes;
    uint32_t fetchers, idle_count, inline_count;
    struct shares shares; /* of fetches at once */
    struct shares stuck_shares;
    uint64_t next_probe_ns;
    struct fetcher *idle[MAX_THREADS];
    struct fetcher all[MAX_THREADS];
};

static inline uint32_t reserved_fetchers(const struct shared *shared)
{
    uint32_t room = MAX_THREADS - shared->threads - FETCH_THREADS(shared);
    return room < RESERVED_FETCHERS ? room : RESERVED_FETCHERS;
}

void fill_answer(struct fill *fill, const struct waiter *waiter, const struct fetch *fetch);
/* Fetch, answer whoever waits, and hand over to the appender. */
void fill_run(struct fill *fill, struct fetch *fetch, struct counters *counters);
int fill_start_threads(struct fill *fill, const struct shared *shared);
/* One more, or one less. */
void fill_stuck(struct fill *fill, const struct fetch *fetch, bool more);
/* Are all threads that its owner may have stuck? */
bool fill_is_stuck(const struct fill *fill, uint32_t owner);

/* The caller holds the lock for these. */
void fill_hold(struct fill *fill, int64_t bytes);
/* `ahead`: nobody asks for it yet, so nothing is evicted for it. */
bool fill_admits(struct fill *fill, uint32_t length, bool ahead);
/* `cached`: for the blob. Else what one READ asks for. */
struct fetch *fill_add(struct fill *fill, const struct inode_record *record, uint64_t inode, const char *path, bool cached,
                       uint64_t offset, uint32_t length, uint32_t owner);
/* A thread begins to fetch it. */
void fill_begin(struct fill *fill, struct fetch *fetch);
/* Who is to run it: a thread that must be woken, or NULL if all are busy and will come to it. */
struct fetcher *fill_start_fetch(struct fill *fill, struct fetch *fetch);
/* The same for the first that waits in the queue and that one of its owners may have now. */
struct fetcher *fill_start_queued(struct fill *fill);
/* A thread that has nothing to do, if there is a wish that may be fetched now; to be woken. */
struct fetcher *fill_for_wishes(struct fill *fill);

/* After the lock. NULL: nobody. */
void fill_wake(struct fetcher *fetcher);
/* Units that the daemon wants to have fetched, when no reader minds. */
void fill_wish(struct fill *fill, const struct wish *wishes, size_t count);
extern const struct append_events fill_append_events;
