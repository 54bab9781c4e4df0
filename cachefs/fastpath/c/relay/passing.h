/* Requests on their way to Python: sent at once if its socket takes them, else queued for the sender. */
#pragma once

#include "relay/state.h"

/* As `relay_claim`, for a request that will be passed on in any case. */
bool relay_claim_passed(struct relay *relay, uint32_t slot);
/* Gives a slot away to Python; its answer goes to the kernel. False: the owner has too many; the request waits elsewhere for its
 * share, or was refused, and the slot is the caller's own again. After `relay_claim_passed` it is always given away. */
bool relay_pass(struct relay *relay, uint32_t slot);
/* A thread of its own: what could not be sent at once. */
void *relay_run_sender(void *relay);

/* The caller holds the lock for these. */
void enqueue_locked(struct relay *relay, uint32_t slot);
/* What was passed on, or was just being, and has no answer: again, if that can do no harm. `unseen`: surely not done. */
void repeat_locked(struct relay *relay, uint32_t slot, bool unseen);
void doubt_locked(struct relay *relay, uint32_t slot);
/* All that waits to be sent is answered EIO. */
void fail_queued_locked(struct relay *relay);
