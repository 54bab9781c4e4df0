/* One thread appends to the blob, in slabs that the daemon grants. docs/FORMAT.md describes a record. */
#pragma once

#include "appender/fetch.h"
#include "common/daemon.h"

struct appender;

struct append_events { /* called by the appender's thread */
    /* The fetch was appended at `extent`, and reported under this number; NULL: it was not appended. */
    void (*appended)(void *context, struct fetch *fetch, const struct extent *extent, uint64_t report);
    /* Another daemon is there: `append_send` all that is not resolved. */
    void (*report_again)(void *context);
};

/* NULL, with errno: no memory or no thread. */
struct appender *append_start(struct shared *shared, struct daemon *daemon, int blob_fd, const struct append_events *events,
                              void *context);

#define REPORTS_BYTES (32u << 10) /* the most in one message */
/* Sends a message; waits for a daemon that is slow. False: the daemon is gone, or another one must first be told what is not
 * resolved. */
bool append_send(struct appender *appender, enum control_type type, const uint8_t *data, uint32_t length)
    EXCLUDES(appender_lock);

/* Would a payload of this length be appended? `prefetch`: no READ asks for it yet, so nothing is evicted for it. */
bool append_admits(struct appender *appender, uint32_t length, bool prefetch) EXCLUDES(appender_lock);
/* Takes a fetch over, with its payload. False: not now; nothing was taken. */
bool append_queue(struct appender *appender, struct fetch *fetch) EXCLUDES(appender_lock);

void append_slab(struct appender *appender, uint64_t offset) EXCLUDES(appender_lock);
/* The daemon has evicted what its policy gives up, for the request for room of this number. */
void append_room(struct appender *appender, uint64_t answered) EXCLUDES(appender_lock);
/* A daemon is there, the same one or the next one: it can be asked for slabs. */
void append_attached(struct appender *appender, bool same) EXCLUDES(appender_lock);
void append_daemon_gone(struct appender *appender) EXCLUDES(appender_lock);
/* Waits until everything that was taken is written and reported, some seconds at most. */
void append_drain(struct appender *appender) EXCLUDES(appender_lock);
/* Called now and then. Reports up to the number that it returns are in the index, or never will be. */
uint64_t append_tick(struct appender *appender) EXCLUDES(appender_lock);
