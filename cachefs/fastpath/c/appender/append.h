/* Appending to the blob, by one thread, in slabs that the daemon grants. docs/FORMAT.md has the record. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "appender/fetch.h"
#include "common/daemon.h"

struct appender;

struct append_events { /* called by the appender's thread, but for `settled` */
    /* Where it is now, NULL if it was not appended; the number of its report. */
    void (*appended)(void *context, struct fetch *fetch, const struct extent *extent, uint64_t report);
    /* Reports up to a number need not be kept any longer. */
    void (*settled)(void *context, uint64_t report);
    /* Another daemon is there: `append_tell` it all that is not settled. */
    void (*tell_again)(void *context);
};

/* NULL if there is no memory or no thread. */
struct appender *append_start(struct shared *shared, struct daemon *daemon, int blob_fd, const struct append_events *events,
                              void *context);

#define REPORTS_BYTES (32u << 10) /* of reports in one message, at most */
/* Waits for a daemon that is slow. False: it has gone. */
bool append_tell(struct appender *appender, const uint8_t *reports, uint32_t length);

/* Would a payload of this length be appended? `ahead`: nobody asks for it yet, so nothing is evicted for it. */
bool append_admits(struct appender *appender, uint32_t length, bool ahead);
/* Takes a fetch over, with its payload. False: not now; nothing was taken. */
bool append_queue(struct appender *appender, struct fetch *fetch);

void append_slab(struct appender *appender, uint64_t offset);
/* The daemon has evicted all that its policy gives away, for the request for room of this number. */
void append_room(struct appender *appender, uint64_t answered);
/* A daemon is there, the same one or the next: it can be asked for slabs. */
void append_attached(struct appender *appender, bool same);
void append_daemon_gone(struct appender *appender);
/* Waits until everything that was taken is written and reported, some seconds at most. */
void append_drain(struct appender *appender);
void append_tick(struct appender *appender);
