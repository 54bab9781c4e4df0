#include "misses/prefetch_requests.h"

#include <unistd.h>

#define SMOOTHING 8
#define BASE_NS 10000000000u /* after this time the best time is measured anew: the source may have changed */
#define CHANGE_NS 5000000u
#define QUIET_NS 100000000u /* without a miss for this long there is no reader to delay */
#define FIRST_LIMIT 4
#define THREADS_A_CORE 3 /* more threads are no faster: what they fetch must be appended and committed, too */
#define TOLERANCE 8 /* an eighth slower counts as equally good */

void prefetch_init(struct prefetch_requests *requests, const struct shared *shared)
{
    uint32_t fetch_threads = shared->fetch_threads;
    uint32_t spare = fetch_threads > 2 * THREADS_FOR_MISSES ? fetch_threads - THREADS_FOR_MISSES : (fetch_threads + 1) / 2;
    uint32_t cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    *requests = (struct prefetch_requests){.spare = spare, .jobs = &shared->prefetch_jobs};
    requests->most = spare < THREADS_A_CORE * cores ? spare : THREADS_A_CORE * cores;
    requests->limit = requests->most < FIRST_LIMIT ? requests->most : FIRST_LIMIT;
    requests->base_ns = UINT64_MAX;
}

bool prefetch_add_locked(struct prefetch_requests *requests, const struct prefetch_request *request)
{
    if (requests->count == MAX_PREFETCH_REQUESTS)
        return false;
    requests->waiting[(requests->first + requests->count++) % MAX_PREFETCH_REQUESTS] = *request;
    return true;
}

uint32_t prefetch_ready_locked(const struct prefetch_requests *requests, uint64_t now_ns)
{
    uint64_t jobs = *requests->jobs;
    uint32_t limit = now_ns - requests->last_miss_ns > QUIET_NS ? requests->most : requests->limit;
    if (jobs)
        limit = jobs < requests->spare ? (uint32_t)jobs : requests->spare;
    uint32_t free = requests->active < limit ? limit - requests->active : 0;
    return free < requests->count ? free : requests->count;
}

bool prefetch_next_locked(struct prefetch_requests *requests, uint64_t now_ns, struct prefetch_request *out)
{
    if (!prefetch_ready_locked(requests, now_ns))
        return false;
    *out = requests->waiting[requests->first];
    requests->first = (requests->first + 1) % MAX_PREFETCH_REQUESTS;
    requests->count--;
    requests->active++;
    return true;
}

void prefetch_missed_locked(struct prefetch_requests *requests, uint64_t now_ns, uint64_t took_ns)
{
    requests->last_miss_ns = now_ns;
    if (!requests->smoothed_ns)
        requests->smoothed_ns = took_ns;
    requests->smoothed_ns = (requests->smoothed_ns * (SMOOTHING - 1) + took_ns) / SMOOTHING;
    if (now_ns >= requests->next_base_ns) {
        requests->base_ns = requests->smoothed_ns;
        requests->next_base_ns = now_ns + BASE_NS;
    }
    if (requests->smoothed_ns < requests->base_ns)
        requests->base_ns = requests->smoothed_ns;
    if (now_ns < requests->next_change_ns)
        return;
    requests->next_change_ns = now_ns + CHANGE_NS;
    if (requests->smoothed_ns > requests->base_ns + requests->base_ns / TOLERANCE)
        requests->limit = requests->limit > 4 ? requests->limit - requests->limit / 4 : requests->limit > 1 ? requests->limit - 1 : 1;
    else if (requests->limit < requests->most)
        requests->limit++;
}
