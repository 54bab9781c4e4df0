/* A serving thread: it reads requests from /dev/fuse and answers them.
 *
 * One serving thread at a time is the leader, which reads from /dev/fuse; the others wait for leader_lock. A leader resigns
 * before it does anything that may take long, so that the next thread listens meanwhile. An answer that needs no disk is
 * given by the leader itself: waking another thread costs more than the answer. */
#pragma once

#include "common/assertion.h"
#include "kernel/protocol.h"
#include "kernel/reply.h"
#include "worker/fastpath.h"

enum outcome {
    ANSWERED,
    PASS,
    TAKEN, /* the slot no longer belongs to the thread */
    AGAIN, /* the index has changed meanwhile */
};

struct worker { /* used by its thread only */
    struct fastpath *fastpath;
    struct view view;
    struct counters *counters;
    uint32_t slot;
    uint64_t begun_ns;   /* when the current request was read */
    bool bypasses_index; /* the current request found a corrupt record: the index does not count for it */
    uint8_t *scratch;    /* of QUICK_BYTES */
    bool is_leader;
    bool worked;            /* the last request came from the queue of work, not from /dev/fuse */
    struct access_log *log; /* NULL: the daemon does not read it */
    pthread_t thread;
};

/* `scratch`: of QUICK_BYTES, aligned to DIRECT_ALIGNMENT. 0 or an LMDB error code. */
int worker_init(struct worker *worker, struct fastpath *fastpath, struct counters *counters, uint8_t *scratch);
/* Waits until this thread is the leader. */
void leader_become(struct worker *worker) IS_LOCKED(leader_lock);
/* Of a thread that is not the leader: nothing happens. */
void leader_resign(struct worker *worker);

/* For functions that only the leader calls. */
static inline void assert_leader(const struct worker *worker) IS_LOCKED(leader_lock)
{
    ASSERT(worker->is_leader);
}

static inline enum outcome answer(struct worker *worker, const struct request *request, int error, const void *data,
                                  size_t length)
{
    reply(worker->fastpath->device, request->header->unique, error, data, length);
    return ANSWERED;
}

static inline bool mounted_with(const struct worker *worker, uint32_t flag)
{
    return worker->fastpath->shared->flags & flag;
}
