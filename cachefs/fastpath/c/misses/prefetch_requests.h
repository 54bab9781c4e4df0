/* Prefetch requests: units that the daemon wants to have in the cache before they are read.
 *
 * The number that is fetched at once follows what prefetching costs the readers, as in LEDBAT (RFC 6817), a transport that
 * yields to all others: the smoothed time of a reader's fetch is compared with the best time so far. While it is about as
 * good, the limit grows by one; else it shrinks by a quarter. While no reader misses, only the number of threads limits. */
#pragma once

#include "common/lock.h"
#include "common/shared.h"

#define MAX_PREFETCH_REQUESTS 4096
#define THREADS_FOR_MISSES 8 /* fetch threads that prefetch requests never take */

struct prefetch_requests { /* under miss_lock */
    struct prefetch_request waiting[MAX_PREFETCH_REQUESTS]; /* a ring */
    uint32_t first, count;
    uint32_t active;              /* are being fetched; the caller of prefetch_next_locked counts them down */
    uint32_t limit, most;         /* the adaptive limit, and its maximum */
    uint32_t spare;               /* threads that prefetch requests may take */
    const _Atomic uint64_t *jobs; /* a fixed limit, whatever it costs readers; 0: the adaptive limit */
    uint64_t smoothed_ns, base_ns, next_base_ns, next_change_ns, last_miss_ns;
};

void prefetch_init(struct prefetch_requests *requests, const struct shared *shared);
/* False: there are too many already. */
bool prefetch_add_locked(struct prefetch_requests *requests, const struct prefetch_request *request) REQUIRES(miss_lock);
/* The next one, if it may be fetched now, and one more of `active`. */
bool prefetch_next_locked(struct prefetch_requests *requests, uint64_t now_ns, struct prefetch_request *out)
    REQUIRES(miss_lock);
/* How many more may be begun now. */
uint32_t prefetch_ready_locked(const struct prefetch_requests *requests, uint64_t now_ns) REQUIRES(miss_lock);
/* A reader has waited for the source, for `took_ns`. */
void prefetch_missed_locked(struct prefetch_requests *requests, uint64_t now_ns, uint64_t took_ns) REQUIRES(miss_lock);
