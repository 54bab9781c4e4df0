/* Python and its answers: it comes and goes, its answers go to the kernel, and what it owed when it went is settled. */
#pragma once

#include "relay/state.h"

/* Before any thread: takes stock of what a predecessor left. Requests that it had only read are work like any other. False: no memory
 * or no descriptor. */
bool relay_init(struct relay *relay, struct shared *shared, int device);
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

/* The kernel sent its INIT, which is in `shared`. */
void relay_pass_init(struct relay *relay);
/* A caller stops waiting. True if it was found and answered. */
bool relay_interrupt(struct relay *relay, uint64_t unique);
