/* Wishes: units that the daemon would like to have fetched, when no reader minds. The caller holds the lock of `struct fill` (fetching.h).
 *
 * How many are fetched at once follows what they cost the readers, as a scavenger transport does (LEDBAT, RFC 6817): the
 * smoothed time of a reader's fetch is compared with the best that there was. As long as it is about as good there may
 * be one more; when it is not, a quarter less. Where nobody reads there is nobody to mind. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/shared.h"

#define MAX_WISHES 4096
#define THREADS_FOR_MISSES 8 /* of those that fetch; no wish ever takes them */

struct wishes {
    struct wish waiting[MAX_WISHES]; /* a ring */
    uint32_t first, count;
    uint32_t active;           /* are being fetched */
    uint32_t limit, most;      /* how many may be, while nobody says how many */
    uint32_t spare;            /* threads there are for them */
    const _Atomic uint64_t *jobs; /* so many, whatever that costs readers, unless it is 0 */
    uint64_t smoothed_ns, base_ns, next_base_ns, next_change_ns, last_miss_ns;
};

void wishes_init(struct wishes *wishes, const struct shared *shared);
/* False: there are too many already. */
bool wishes_add(struct wishes *wishes, const struct wish *wish);
/* The next one, if it may be fetched now; `wishes_end` when it was. */
bool wishes_begin(struct wishes *wishes, uint64_t now_ns, struct wish *out);
void wishes_end(struct wishes *wishes);
/* How many more may be begun now. */
uint32_t wishes_ready(const struct wishes *wishes, uint64_t now_ns);
/* A reader has waited so long for the source. */
void wishes_missed(struct wishes *wishes, uint64_t now_ns, uint64_t took_ns);
