/* Requests in flight, and their way to Python and back.
 *
 * Every request is read from /dev/fuse into a slot of the shared memory. What the fast path answers itself leaves its
 * slot at once; what is passed on keeps it until it is answered, so that a successor of either side knows what is owed.
 *
 * Python gets a unique of ours, which names the slot; the kernel's own stays in it. One lock guards all slots but those
 * that threads own (SLOT_READING); a hit never takes it. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/shared.h"
#include "common/shares.h"

#define PART_BYTES (128u << 10) /* of a READ that is passed on: libfuse's reply is one message (hazard 5) */
#define MAX_PARTS 16
#define NO_SLOT UINT32_MAX

/* What nobody may take: for requests that arrive, of which nobody knows yet whether they are hits. */
#define SLOTS_FOR_THREADS 32
#define RESERVED_SLOTS 160 /* for owners that have next to nothing (shares.h) */

/* At Python at once; one owner alone has 128. Python takes them one after the other, half a millisecond each. Those of the
 * reserve are bounded by the slots. */
#define MAX_PASSED 171
#define RESERVED_PASSED SLOT_COUNT

#define RESERVED_PARKED 512

struct split;

struct lot { /* lot.c; its requests are in the shared memory */
    struct shares shares;
    uint32_t first, last; /* from oldest to newest; NO_SLOT: none */
    uint32_t next[PARKED_COUNT], previous[PARKED_COUNT], owners[PARKED_COUNT];
    uint32_t free_count, free[PARKED_COUNT];
};

struct relay {
    struct shared *shared;
    uint8_t *data; /* of the slots */
    int device;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* a Python came or went, or there is something to send */
    int python;             /* our end of its socket, -1: nobody there */
    int python_end;         /* its end: what a dead one never read comes out here */
    bool going;             /* told to hang up; the receiver finishes what has arrived */
    bool given_up;          /* nobody came back in time */
    uint64_t absent_since_ns;
    uint32_t free_count, queue_head, queue_count;
    uint32_t free[SLOT_COUNT];
    struct { uint32_t slot; uint64_t word; } queue[SLOT_COUNT];
    struct split *splits[SLOT_COUNT];
    /* Of slots that no thread has as its own: they count as their owner's (shares.h). */
    struct shares slot_shares, passed_shares; /* `passed_shares`: of those that Python has, or is about to */
    bool counted[SLOT_COUNT], counted_passed[SLOT_COUNT];
    uint32_t owners[SLOT_COUNT];
    struct lot lot;
    /* Requests in slots that no thread has taken yet: left by a predecessor, or out of the lot. */
    _Atomic uint32_t work_count;
    uint32_t work_head, work[SLOT_COUNT];
    int work_ready; /* an eventfd: readable while there are any */
    /* Slots whose memory this process has touched. A kill in a page fault, while the kernel copies a request to us, makes
     * it answer that request EIO (fuse_dev_do_read): so there must be none. */
    bool mapped[SLOT_COUNT];
    pthread_t receiver, sender;
};
