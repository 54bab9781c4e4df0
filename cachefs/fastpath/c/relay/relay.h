/* Python comes and goes; its answers go to the kernel; what it had not answered when it went is passed on again or fails. */
#pragma once

#include "relay/state.h"

/* Called before any thread starts: takes stock of what a predecessor left. Requests that it had only read become work. False:
 * no memory or no descriptor. */
bool relay_init(struct relay *relay, struct shared *shared, int device) EXCLUDES(relay_lock);
int relay_start(struct relay *relay);

/* A Python is there. `same`: it already has the requests in SLOT_PASSED. Takes both descriptors. */
void relay_attach(struct relay *relay, int python, int python_end, bool same) EXCLUDES(relay_lock);
/* Python's process has died: the answers that it sent are still delivered, the other requests wait for the next Python. */
void relay_hang_up(struct relay *relay) EXCLUDES(relay_lock);
/* Before the end of this process: returns with the lock taken, so that no message is half sent, and after it is known which
 * requests a Python that is gone has not read. */
void relay_quiesce(struct relay *relay) ACQUIRE(relay_lock);
/* A change that a dead Python may or may not have made, NO_SLOT: there is none. Free it when a daemon has received it. */
uint32_t relay_next_doubt(struct relay *relay) EXCLUDES(relay_lock);
/* Called now and then: stops waiting for a Python after the time-out. */
void relay_tick(struct relay *relay) EXCLUDES(relay_lock);

/* The kernel sent its INIT, which is in `shared`. */
void relay_pass_init(struct relay *relay) EXCLUDES(relay_lock);
/* A caller stops waiting. True: its request was found and answered. */
bool relay_interrupt(struct relay *relay, uint64_t unique) EXCLUDES(relay_lock);
