/* How long requests take, by kind: histograms with four buckets for each power of two, from a microsecond on, like those of
 * HdrHistogram. There are several copies, so that threads seldom count in the same one. latency.py reads them. */
#pragma once

#include "common/contract.h"

static inline uint32_t latency_bucket(uint64_t ns)
{
    if (ns < (1u << LATENCY_FIRST_BIT))
        return 0;
    uint32_t top = 63 - (uint32_t)__builtin_clzll(ns);
    uint32_t bucket = (top - LATENCY_FIRST_BIT) * 4 + (uint32_t)(ns >> (top - 2) & 3);
    return bucket < LATENCY_BUCKETS ? bucket : LATENCY_BUCKETS - 1;
}

/* `counters`: those of the calling thread. */
static inline void latency_note(struct shared *shared, const struct counters *counters, enum latency_kind kind, uint64_t ns)
{
    struct latency *latency = &shared->latencies[(size_t)(counters - shared->counters) % LATENCY_COPIES].kinds[kind];
    atomic_fetch_add_explicit(&latency->sum_ns, ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&latency->counts[latency_bucket(ns)], 1, memory_order_relaxed);
}
