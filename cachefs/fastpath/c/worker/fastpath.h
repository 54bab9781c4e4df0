/* What the threads share. Made once, in main. */
#pragma once

#include <pthread.h>
#include <stdint.h>

#include "cache/ahead.h"
#include "cache/blob.h"
#include "cache/index.h"
#include "common/daemon.h"
#include "relay/state.h"

struct appender;
struct fill;

struct fastpath {
    struct shared *shared;
    struct index index;
    struct blob blob;
    struct relay relay;
    struct daemon daemon;
    struct fill *fill;         /* NULL: misses are Python's */
    struct appender *appender; /* NULL: the same */
    int device, source;
    pthread_mutex_t turn; /* to listen to /dev/fuse */
    /* Of the thread that has the turn: */
    uint32_t reader, crowd; /* which process read last; for so many READs of the same one the turn is still given away */
    uint32_t eager; /* whether requests come soon after each other */
    struct ahead ahead;
};
