/* Slots are taken and given back. Requests that wait for their owner's share of slots are parked in the lot.
 *
 * The owner of a request is known only after the request was read from /dev/fuse, and a request cannot be put back. So a
 * request that would take its owner beyond the share (shares.h) is copied from its slot into the lot, which is made of
 * smaller pieces of the shared memory. The thread reads the next request into the same slot, so the next request always
 * finds a thread and a slot. When the owner gives a slot back, the oldest parked request whose owner may have a slot is
 * copied into it, and is served like one that has just arrived: it may be a hit by now. */
#pragma once

#include "relay/state.h"

/* A slot for a thread to read into. NO_SLOT: all are taken. */
uint32_t relay_take_slot(struct relay *relay) EXCLUDES(relay_lock);
void relay_free_slot(struct relay *relay, uint32_t slot) EXCLUDES(relay_lock);
/* May a request keep the caller's slot while it waits? The slot counts as the owner's then, until it is freed. */
bool relay_claim(struct relay *relay, uint32_t slot) EXCLUDES(relay_lock);
/* The request was answered after all; the slot belongs to the caller again. */
void relay_unclaim(struct relay *relay, uint32_t slot) EXCLUDES(relay_lock);
/* A request that is to be served; its slot belongs to the caller from now on. NO_SLOT: there is none. */
uint32_t relay_next_work(struct relay *relay) EXCLUDES(relay_lock);
/* Uniques of requests that a predecessor left and that need no answer once their callers are dying; `room` of them at most.
 * Called before any thread starts. */
uint32_t relay_interruptible(const struct relay *relay, uint64_t *uniques, uint32_t room) EXCLUDES(relay_lock);
/* The process that waits for this request. 0: the request is not known, or was answered. */
uint32_t relay_caller(struct relay *relay, uint64_t unique) EXCLUDES(relay_lock);

void free_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
void fail_locked(struct relay *relay, uint32_t slot, int error) REQUIRES(relay_lock);
bool claim_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
void add_work_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
/* Parks the request of a slot whose owner has too many, or refuses it. The slot is empty then. */
void park_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
bool interrupt_parked_locked(struct relay *relay, uint64_t unique) REQUIRES(relay_lock);
/* After all slots were taken stock of. False: no memory. */
bool lot_init_locked(struct relay *relay) REQUIRES(relay_lock);
