#include "serve/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "misses/fill.h"
#include "relay/lot.h"
#include "relay/relay.h"
#include "worker/fastpath.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t interrupted[MAX_INTERRUPTED];
static uint32_t count;

/* The caller of a request that has no answer yet, 0: there is none. */
static uint32_t caller_of(struct fastpath *fastpath, uint64_t unique)
{
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        const struct slot_head *head = &fastpath->shared->slots[slot];
        if (head->unique != unique || (head->word & 0xff) == SLOT_FREE)
            continue;
        uint32_t caller = head->caller;
        if (head->unique == unique) /* else it is another request's by now */
            return caller;
    }
    return relay_parked_caller(&fastpath->relay, unique);
}

/* Has it been sent SIGKILL? The kernel adds that to whatever else ends a process (complete_signal). */
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

/* False: it waits on, or is in a thread's hands at the moment. */
static bool settle(struct fastpath *fastpath, uint64_t unique)
{
    uint32_t pid = caller_of(fastpath, unique);
    if (!pid)
        return true;
    if (!is_dying(pid))
        return false;
    return relay_interrupt(&fastpath->relay, unique) || fill_interrupt(fastpath->fill, unique);
}

void interrupt_init(struct fastpath *fastpath)
{
    count = relay_interruptible(&fastpath->relay, interrupted, MAX_INTERRUPTED);
}

void interrupt(struct fastpath *fastpath, uint64_t unique)
{
    if (settle(fastpath, unique))
        return;
    pthread_mutex_lock(&lock);
    if (count < MAX_INTERRUPTED)
        interrupted[count++] = unique;
    pthread_mutex_unlock(&lock);
}

void interrupt_tick(struct fastpath *fastpath)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < count;)
        if (settle(fastpath, interrupted[i]))
            interrupted[i] = interrupted[--count];
        else
            i++;
    pthread_mutex_unlock(&lock);
}
