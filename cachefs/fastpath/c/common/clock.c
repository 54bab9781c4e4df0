#include "common/clock.h"

int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

uint64_t monotonic_ns(void)
{
    return (uint64_t)clock_ns(CLOCK_MONOTONIC);
}
