/* INTERRUPT: the caller of a request got a signal. A caller that is killed stops waiting. A caller that has a handler for the
 * signal waits on, as it would on a local disk: a job that is not prepared for EINTR never sees it. */
#pragma once

#include <stdint.h>

#include "common/lock.h"

struct fastpath;

#define MAX_INTERRUPTED 256

/* Called before any thread starts: the interrupts that a predecessor received are lost, so each request that it left may be
 * interrupted. */
void interrupt_init(struct fastpath *fastpath) EXCLUDES(interrupt_lock);
/* `unique`: of the request whose caller got a signal. */
void interrupt(struct fastpath *fastpath, uint64_t unique) EXCLUDES(interrupt_lock);
/* Called now and then: callers that were not dying may be dying by now. The kernel sends INTERRUPT only once. */
void interrupt_tick(struct fastpath *fastpath) EXCLUDES(interrupt_lock);
