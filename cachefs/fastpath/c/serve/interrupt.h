/* INTERRUPT: a caller got a signal while it waits. One that is killed stops waiting; one that has a handler for its signal
 * waits on, as it would on a local disk: a job that is not prepared for EINTR never sees it. */
#pragma once

#include <stdint.h>

struct fastpath;

#define MAX_INTERRUPTED 256

/* Before any thread: what the kernel told a predecessor died with it, so all that it left may be concerned. */
void interrupt_init(struct fastpath *fastpath);
/* `unique`: of the request whose caller got a signal. */
void interrupt(struct fastpath *fastpath, uint64_t unique);
/* Once in a while: callers that were not dying may be by now. The kernel says INTERRUPT only once. */
void interrupt_tick(struct fastpath *fastpath);
