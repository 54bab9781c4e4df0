/* Requests that have no answer yet, and their way to Python and back.
 *
 * Every request is read from /dev/fuse into a slot of the shared memory. A request that the fast path answers itself leaves
 * its slot at once. A request that is passed on keeps its slot until it is answered, so that a successor of either process
 * knows which requests are still to be answered.
 *
 * Python gets a unique of ours, which names the slot; the kernel's unique stays in the slot. relay_lock guards all slots but
 * those that belong to a thread (SLOT_READING); a hit never takes it. */
#pragma once

#include "common/lock.h"
#include "common/shared.h"
#include "common/shares.h"

#define PART_BYTES (128u << 10) /* of a READ that is passed on: libfuse's reply is one message (hazard 5) */
#define MAX_PARTS 16
#define NO_SLOT UINT32_MAX

/* Slots that no owner may take: requests that arrive are read into them, because each one may be a hit. */
#define SLOTS_FOR_THREADS 32
#define RESERVED_SLOTS 160 /* for owners that have nearly no slots (shares.h) */

/* Requests that Python has at once; one owner alone has 128. Python takes them one after the other, half a millisecond each.
 * The slots bound those of the reserve. */
#define MAX_PASSED 171
#define RESERVED_PASSED SLOT_COUNT

#define RESERVED_PARKED 512

struct split;

struct lot { /* parked requests (lot.h); the requests themselves are in the shared memory. Guarded by relay_lock */
    struct shares shares;
    uint32_t first, last; /* from oldest to newest; NO_SLOT: none */
    uint32_t next[PARKED_COUNT], previous[PARKED_COUNT], owners[PARKED_COUNT];
    uint32_t free_count, free[PARKED_COUNT];
};

struct relay {
    struct shared *shared;
    uint8_t *data; /* of the slots */
    int device;
    int work_ready; /* an eventfd: readable while `work` is not empty */
    pthread_t receiver, sender;

    pthread_cond_t changed;                 /* with relay_lock: a Python came or went, or there is something to send */
    int python GUARDED_BY(relay_lock);      /* our end of its socket; -1: there is no Python */
    int python_end GUARDED_BY(relay_lock);  /* its end: what a dead Python has not read can be read here */
    bool going GUARDED_BY(relay_lock);      /* we have hung up; the receiver still delivers what has arrived */
    bool given_up GUARDED_BY(relay_lock);   /* no Python came back in time */
    uint64_t absent_since_ns GUARDED_BY(relay_lock);
    uint32_t free_count GUARDED_BY(relay_lock), free[SLOT_COUNT] GUARDED_BY(relay_lock);
    uint32_t queue_head GUARDED_BY(relay_lock), queue_count GUARDED_BY(relay_lock);
    struct { uint32_t slot; uint64_t word; } queue[SLOT_COUNT] GUARDED_BY(relay_lock); /* to be passed on */
    struct split *splits[SLOT_COUNT] GUARDED_BY(relay_lock);
    /* Shares of slots that do not belong to a thread: they count as their owner's (shares.h). */
    struct shares slot_shares GUARDED_BY(relay_lock);
    struct shares passed_shares GUARDED_BY(relay_lock); /* of slots whose request Python has, or is about to get */
    bool counted[SLOT_COUNT]; /* changed under relay_lock; a thread may read the entry of its own slot without it */
    bool counted_passed[SLOT_COUNT] GUARDED_BY(relay_lock);
    uint32_t owners[SLOT_COUNT] GUARDED_BY(relay_lock);
    struct lot lot GUARDED_BY(relay_lock);
    /* Requests in slots that no thread serves yet: a predecessor left them, or they come out of the lot. */
    _Atomic uint32_t work_count; /* changed under relay_lock, read without it */
    uint32_t work_head GUARDED_BY(relay_lock), work[SLOT_COUNT] GUARDED_BY(relay_lock);
    /* Slots whose memory this process has touched; used by the thread that has the slot. If a process is killed in a page
     * fault while the kernel copies a request to it, the kernel answers that request EIO (fuse_dev_do_read). So slots are
     * touched before they are read into. */
    bool mapped[SLOT_COUNT];
};
