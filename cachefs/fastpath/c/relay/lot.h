/* Slots are taken and given back; requests that wait for their owner's share of slots: the lot.
 *
 * A request must be read from /dev/fuse before anybody knows whose it is, and cannot be put back. So a request that would take
 * its owner beyond the share (shares.h) is copied from its slot into the lot, which is made of smaller pieces of the shared
 * memory, and the thread reads the next request into the same slot: the next request finds a thread and a slot. When the
 * owner gives a slot back, the oldest request of the lot that may have one is copied into it, and served like one that
 * has just arrived: it may be a hit by now. */
#pragma once

#include "relay/state.h"

/* A slot for a thread to read into. NO_SLOT: all are taken. */
uint32_t relay_take_slot(struct relay *relay);
void relay_free_slot(struct relay *relay, uint32_t slot);
/* May the caller's slot be kept by a request, beyond the moment? It counts as its owner's then, until it is freed. */
bool relay_claim(struct relay *relay, uint32_t slot);
/* The request was answered after all; the slot is the caller's own again. */
void relay_unclaim(struct relay *relay, uint32_t slot);
/* A request that is to be served, in a slot that is the caller's now; NO_SLOT: there is none. */
uint32_t relay_next_work(struct relay *relay);
/* Requests that a predecessor left, and that need not be answered once their callers are dying: at most `room` of their
 * uniques. Before any thread. */
uint32_t relay_interruptible(const struct relay *relay, uint64_t *uniques, uint32_t room);
/* The process of a request that waits for its share. 0: there is none. */
uint32_t relay_parked_caller(struct relay *relay, uint64_t unique);

/* The caller holds the lock for these. */
void free_locked(struct relay *relay, uint32_t slot);
void fail_locked(struct relay *relay, uint32_t slot, int error);
bool claim_locked(struct relay *relay, uint32_t slot);
void add_work_locked(struct relay *relay, uint32_t slot);
/* Takes the request out of a slot whose owner has too many, or refuses it. The slot is empty then. */
void park_locked(struct relay *relay, uint32_t slot);
bool interrupt_parked_locked(struct relay *relay, uint64_t unique);
/* After the slots were looked through. False: no memory. */
bool lot_init(struct relay *relay);
