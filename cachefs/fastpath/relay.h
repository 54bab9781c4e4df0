/* Requests in flight, and their way to Python and back.
 *
 * Every request is read from /dev/fuse into a slot of the shared memory. What the fast path answers itself leaves its
 * slot at once; what is passed on keeps it until it is answered, so that a successor of either side knows what is owed.
 *
 * Python gets a unique of ours, which names the slot; the kernel's own stays in it. One lock guards all slots but those
 * that threads own (SLOT_READING); a hit never takes it. */
#ifndef CACHEFS_RELAY_H
#define CACHEFS_RELAY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "protocol.h"
#include "reply.h"
#include "shared.h"
#include "shares.h"

#define PART_BYTES (128u << 10) /* of a READ that is passed on: libfuse's reply is one message (hazard 5) */
#define MAX_PARTS 16
#define FAST_HANDLE ((uint64_t)1 << 63) /* in fh: ours; the rest is the inode, or the request's place (relay.c; hazard 2) */
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

struct lot { /* relay_lot.c; its requests are in the shared memory */
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

/* Before any thread: takes stock of what a predecessor left. Requests that it had only read are work like any other. False: no memory
 * or no descriptor. */
bool relay_init(struct relay *relay, struct shared *shared, int device);
/* A request that is to be served, in a slot that is the caller's now; NO_SLOT: there is none. */
uint32_t relay_next_work(struct relay *relay);
int relay_start(struct relay *relay);

/* A Python is there. `same`: the one that has what is SLOT_PASSED. Takes both descriptors. */
void relay_attach(struct relay *relay, int python, int python_end, bool same);
/* Its process has died: what it answered is still delivered, the rest waits for the next one. */
void relay_hang_up(struct relay *relay);
/* Before the end of this process: returns with the lock held, so that nothing is in the middle of being sent, and when what
 * a Python that is gone has not read is known. */
void relay_quiesce(struct relay *relay);
/* A change of which nobody knows whether it was made, NO_SLOT if there is none. Free it when a daemon has been told. */
uint32_t relay_next_doubt(struct relay *relay);
/* Once in a while: gives up on waiting when that has lasted too long. */
void relay_tick(struct relay *relay);

/* A slot for a thread to read into. NO_SLOT: all are taken. */
uint32_t relay_take_slot(struct relay *relay);
void relay_free_slot(struct relay *relay, uint32_t slot);
void *slot_data(const struct relay *relay, uint32_t slot);
/* Marks a thread's own slot as empty, before it reads. */
void relay_ready_slot(struct relay *relay, uint32_t slot);
void relay_fill_slot(struct relay *relay, uint32_t slot, uint32_t length, uint64_t unique);

/* May the caller's slot be kept by a request, beyond the moment? It counts as its owner's then, until it is freed. */
bool relay_claim(struct relay *relay, uint32_t slot);
/* The same for a request that will be passed on in any case. */
bool relay_claim_passed(struct relay *relay, uint32_t slot);
/* The request was answered after all; the slot is the caller's own again. */
void relay_unclaim(struct relay *relay, uint32_t slot);
/* Gives a slot away to Python; its answer goes to the kernel. False: the owner has too many; the request waits elsewhere for its
 * share, or was refused, and the slot is the caller's own again. After `relay_claim_passed` it is always given away. */
bool relay_pass(struct relay *relay, uint32_t slot);
/* The kernel sent its INIT, which is in `shared`. */
void relay_pass_init(struct relay *relay);
/* A caller stops waiting. True if it was found and answered. */
bool relay_interrupt(struct relay *relay, uint64_t unique);
/* Requests that a predecessor left, and that need not be answered once their callers are dying: at most `room` of their
 * uniques. Before any thread. */
uint32_t relay_interruptible(const struct relay *relay, uint64_t *uniques, uint32_t room);
/* The process of a request that waits for its share. 0: there is none. */
uint32_t relay_parked_caller(struct relay *relay, uint64_t unique);

#endif
