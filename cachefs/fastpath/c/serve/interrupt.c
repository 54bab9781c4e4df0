#include "serve/interrupt.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "misses/miss.h"
#include "relay/lot.h"
#include "relay/relay.h"

struct lock interrupt_lock = LOCK_INIT;
static uint64_t interrupted[MAX_INTERRUPTED] GUARDED_BY(interrupt_lock); /* requests whose callers wait on */
static uint32_t count GUARDED_BY(interrupt_lock);

/* Was it sent SIGKILL? The kernel adds SIGKILL to any other signal that ends a process (complete_signal). */
static bool is_dying(uint32_t pid)
{
    char path[32], line[256];
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *status = fopen(path, "re");
    bool dying = false;
    while (status && !dying && fgets(line, sizeof line, status))
        if (!strncmp(line, "SigPnd:", 7) || !strncmp(line, "ShdPnd:", 7))
            dying = strtoull(line + 7, NULL, 16) >> (SIGKILL - 1) & 1;
    if (status)
        fclose(status);
    return dying;
}

/* False: the caller waits on, or a thread serves the request right now. */
static bool try_interrupt(struct fastpath *fastpath, uint64_t unique)
{
    uint32_t pid = relay_caller(&fastpath->relay, unique);
    return !pid || (is_dying(pid) && (relay_interrupt(&fastpath->relay, unique) || miss_interrupt(fastpath->misses, unique)));
}

void interrupt_init(struct fastpath *fastpath)
{
    lock_take(&interrupt_lock);
    count = relay_interruptible(&fastpath->relay, interrupted, MAX_INTERRUPTED);
    lock_release(&interrupt_lock);
}

void interrupt(struct fastpath *fastpath, uint64_t unique)
{
    if (try_interrupt(fastpath, unique))
        return;
    lock_take(&interrupt_lock);
    if (count < MAX_INTERRUPTED)
        interrupted[count++] = unique;
    lock_release(&interrupt_lock);
}

void interrupt_tick(struct fastpath *fastpath)
{
    lock_take(&interrupt_lock);
    for (uint32_t i = 0; i < count;)
        if (try_interrupt(fastpath, interrupted[i]))
            interrupted[i] = interrupted[--count];
        else
            i++;
    lock_release(&interrupt_lock);
}
