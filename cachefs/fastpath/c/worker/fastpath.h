/* What the threads share. Made once, in main. */
#pragma once

#include "cache/blob.h"
#include "cache/index.h"
#include "cache/speculative_read.h"
#include "common/daemon.h"
#include "common/lock.h"
#include "relay/state.h"

struct appender;
struct misses;

struct fastpath {
    struct shared *shared;
    struct index index;
    struct blob blob;
    struct relay relay;
    struct daemon daemon;
    struct misses *misses;     /* NULL: Python serves misses */
    struct appender *appender; /* NULL: the same */
    int device, source;
    /* A READ or listing of the same process as the last one counts this down; one of another process sets it. 0: there
     * is one reader. */
    uint32_t concurrent_readers GUARDED_BY(leader_lock);
    uint32_t reader GUARDED_BY(leader_lock);    /* the process that read last */
    uint32_t busy_poll GUARDED_BY(leader_lock); /* grows with each request that follows the last one soon; 0: sleep at once */
    struct speculative_read speculative_read GUARDED_BY(leader_lock);
};
