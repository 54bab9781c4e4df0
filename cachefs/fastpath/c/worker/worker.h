/* A thread that reads requests from /dev/fuse and answers them: what it has for itself, and its turn to listen.
 *
 * One thread listens at a time. It gives its turn away before whatever may take long, so that the next thread listens
 * meanwhile. */
#pragma once

#include <stdbool.h>

#include "kernel/protocol.h"
#include "kernel/reply.h"
#include "worker/fastpath.h"

enum outcome {
    ANSWERED,
    PASS,
    TAKEN, /* the slot is not the thread's any more */
    AGAIN, /* the index has changed meanwhile */
};

struct worker {
    struct fastpath *fastpath;
    struct view view;
    struct counters *counters;
    uint32_t slot;
    uint64_t begun_ns; /* when the request of the moment was read */
    bool distrusts; /* the request of the moment found a corrupt record: bypass the index */
    uint8_t *scratch; /* of QUICK_BYTES */
    bool has_turn;
    bool worked; /* on a request that waited, last time */
    struct access_log *log; /* NULL: the daemon does not read it */
    pthread_t thread;
};

/* `scratch`: of QUICK_BYTES, aligned to DIRECT_ALIGNMENT. 0 or an LMDB error code. */
int worker_init(struct worker *worker, struct fastpath *fastpath, struct counters *counters, uint8_t *scratch);
void take_turn(struct worker *worker);
void give_turn(struct worker *worker);

static inline void answer(struct worker *worker, const struct request *request, int error, const void *data, size_t length)
{
    reply(worker->fastpath->device, request->header->unique, error, data, length);
}

static inline bool mounted_with(const struct worker *worker, uint32_t flag)
{
    return worker->fastpath->shared->flags & flag;
}
