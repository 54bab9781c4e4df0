#include "misses/wishes.h"

#include <unistd.h>

#define SMOOTHING 8
#define BASE_NS 10000000000u /* after so long the best time is forgotten: the source may have changed */
#define CHANGE_NS 5000000u
#define QUIET_NS 100000000u /* nobody has missed for so long: nobody minds */
#define FIRST_LIMIT 4
#define THREADS_A_CORE 3 /* more of them fetch no faster: what they fetch must be appended and committed, too */
#define TOLERANCE 8 /* an eighth slower is about as good */

void wishes_init(struct wishes *wishes, const struct shared *shared)
{
    uint32_t fetch_threads = shared->fetch_threads;
    uint32_t spare = fetch_threads > 2 * THREADS_FOR_MISSES ? fetch_threads - THREADS_FOR_MISSES : (fetch_threads + 1) / 2;
    uint32_t cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    *wishes = (struct wishes){.spare = spare, .jobs = &shared->wish_jobs};
    wishes->most = spare < THREADS_A_CORE * cores ? spare : THREADS_A_CORE * cores;
    wishes->limit = wishes->most < FIRST_LIMIT ? wishes->most : FIRST_LIMIT;
    wishes->base_ns = UINT64_MAX;
}

bool wishes_add(struct wishes *wishes, const struct wish *wish)
{
    if (wishes->count == MAX_WISHES)
        return false;
    wishes->waiting[(wishes->first + wishes->count++) % MAX_WISHES] = *wish;
    return true;
}

uint32_t wishes_ready(const struct wishes *wishes, uint64_t now_ns)
{
    uint64_t jobs = *wishes->jobs;
    uint32_t limit = now_ns - wishes->last_miss_ns > QUIET_NS ? wishes->most : wishes->limit;
    if (jobs)
        limit = jobs < wishes->spare ? (uint32_t)jobs : wishes->spare;
    uint32_t free = wishes->active < limit ? limit - wishes->active : 0;
    return free < wishes->count ? free : wishes->count;
}

bool wishes_begin(struct wishes *wishes, uint64_t now_ns, struct wish *out)
{
    if (!wishes_ready(wishes, now_ns))
        return false;
    *out = wishes->waiting[wishes->first];
    wishes->first = (wishes->first + 1) % MAX_WISHES;
    wishes->count--;
    wishes->active++;
    return true;
}

void wishes_end(struct wishes *wishes)
{
    wishes->active--;
}

void wishes_missed(struct wishes *wishes, uint64_t now_ns, uint64_t took_ns)
{
    wishes->last_miss_ns = now_ns;
    if (!wishes->smoothed_ns)
        wishes->smoothed_ns = took_ns;
    wishes->smoothed_ns = (wishes->smoothed_ns * (SMOOTHING - 1) + took_ns) / SMOOTHING;
    if (now_ns >= wishes->next_base_ns) {
        wishes->base_ns = wishes->smoothed_ns;
        wishes->next_base_ns = now_ns + BASE_NS;
    }
    if (wishes->smoothed_ns < wishes->base_ns)
        wishes->base_ns = wishes->smoothed_ns;
    if (now_ns < wishes->next_change_ns)
        return;
    wishes->next_change_ns = now_ns + CHANGE_NS;
    if (wishes->smoothed_ns > wishes->base_ns + wishes->base_ns / TOLERANCE)
        wishes->limit = wishes->limit > 4 ? wishes->limit - wishes->limit / 4 : wishes->limit > 1 ? wishes->limit - 1 : 1;
    else if (wishes->limit < wishes->most)
        wishes->limit++;
}
