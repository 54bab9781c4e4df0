#include "kernel/complaint.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"

static const uint64_t PAUSE_NS = 60ull * 1000 * 1000 * 1000;

void complain(const char *what)
{
    static _Atomic uint64_t next_ns;
    int error = errno;
    uint64_t now_ns = monotonic_ns();
    uint64_t due_ns = atomic_load(&next_ns);
    if (now_ns >= due_ns && atomic_compare_exchange_strong(&next_ns, &due_ns, now_ns + PAUSE_NS))
        fprintf(stderr, "fast path: %s: %s\n", what, strerror(error));
}
