/* Requests on their way to Python: sent at once if its socket takes them, else queued for the sender. */
#pragma once

#include "relay/state.h"

/* As `relay_claim`, for a request that will be passed on in any case. */
bool relay_claim_passed(struct relay *relay, uint32_t slot) EXCLUDES(relay_lock);
/* Gives a slot to Python; Python's answer goes to the kernel. False: the owner has too many requests; this one was parked or
 * refused, and the slot belongs to the caller again. After `relay_claim_passed` it always returns true. */
bool relay_pass(struct relay *relay, uint32_t slot) EXCLUDES(relay_lock);
/* The sender's thread: it sends what could not be sent at once. */
void *relay_run_sender(void *relay) EXCLUDES(relay_lock);

void enqueue_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
/* Passes a request on again that was passed on and has no answer, if that does no harm. `unseen`: surely not done. */
void repeat_locked(struct relay *relay, uint32_t slot, bool unseen) REQUIRES(relay_lock);
void doubt_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
/* All requests that wait to be sent are answered EIO. */
void fail_queued_locked(struct relay *relay) REQUIRES(relay_lock);
