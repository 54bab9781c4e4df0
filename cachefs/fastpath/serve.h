/* Threads that take turns in listening to /dev/fuse; each serves what it has read. */
#ifndef CACHEFS_SERVE_H
#define CACHEFS_SERVE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "ahead.h"
#include "blob.h"
#include "buffer.h"
#include "index.h"
#include "protocol.h"
#include "relay.h"

struct control_socket;
struct fill;

enum outcome {
    ANSWERED,
    PASS,
    TAKEN, /* the slot is somebody else's now */
    AGAIN, /* the index has changed meanwhile */
};

/* Everything that the threads share. Made once, in main. */
struct fastpath {
    struct shared *shared;
    struct index index;
    struct blob blob;
    struct relay relay;
    struct control_socket *control;
    struct fill *fill; /* NULL: misses are Python's */
    int device, source;
    pthread_mutex_t turn; /* to listen to /dev/fuse */
    /* Of who has the turn: */
    uint32_t reader, crowd; /* who asked last; for so many READs of the same one it is still given away */
    uint32_t eager; /* whether requests come soon after each other */
    struct ahead ahead;
};

/* Of scratch that each thread has for itself: what an epoch of small files asks for. Larger READs take a buffer. */
#define QUICK_READ_BYTES BLOCK_BYTES
#define QUICK_BYTES SCRATCH_BYTES(QUICK_READ_BYTES)

/* A thread that reads requests from /dev/fuse. */
struct worker {
    struct fastpath *fastpath;
    struct view view;
    struct counters *counters;
    uint32_t slot;
    uint64_t begun_ns; /* when the request of the moment was read */
    bool distrusts; /* the request of the moment found a corrupt record: what the index has will not do */
    uint8_t *scratch; /* of QUICK_BYTES */
    bool has_turn;
    bool worked; /* on a request that waited, last time */
    struct access_log *log; /* NULL: nobody wants to know */
    pthread_t thread;
};

/* `scratch`: of QUICK_BYTES, aligned to DIRECT_ALIGNMENT. 0 or an errno. */
int worker_init(struct worker *worker, struct fastpath *fastpath, struct counters *counters, uint8_t *scratch);
/* Until the mount is gone. */
void *worker_run(void *worker);
/* Before whatever may take long: the next one listens meanwhile. */
void give_turn(struct worker *worker);
/* Answers one request, or passes it on, which takes the slot away. */
void serve(struct worker *worker);

#endif
