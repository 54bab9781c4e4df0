/* Appending to the blob, by one thread, in slabs that the daemon grants. docs/FORMAT.md has the record. */
#ifndef CACHEFS_APPEND_H
#define CACHEFS_APPEND_H

#include <stdbool.h>
#include <stdint.h>

#include "blob.h"
#include "control.h"
#include "fill_table.h"

struct appender;

/* `appended`: (fetch, where it is now or NULL if it was not appended, number of its report).
 * `settled`: reports up to a number need not be kept any longer. NULL if there is no memory or no thread. */
struct appender *append_start(struct shared *shared, struct control_socket *control, int blob_fd, void *context,
                              void (*appended)(void *, struct fetch *, const struct extent *, uint64_t),
                              void (*settled)(void *, uint64_t));

#define MAX_REPORT_BYTES (sizeof(struct filled) + MAX_CHECKSUMS * sizeof(uint64_t))
/* Writes one report, at most MAX_REPORT_BYTES; returns its length. */
uint32_t encode_report(uint8_t *out, const struct fetch *fetch, const struct extent *extent, uint64_t number);

/* Would a payload of this length be appended now? */
bool append_admits(struct appender *appender, uint32_t length);
/* Takes a fetch over, with its payload. False: not now; nothing was taken. */
bool append_queue(struct appender *appender, struct fetch *fetch);
/* For what was appended a moment ago: through the page cache, where it still is. */
const struct blob *append_blob(struct appender *appender);

void append_slab(struct appender *appender, uint64_t offset);
/* A daemon is there, the same one or the next: it can be asked for slabs. */
void append_attached(struct appender *appender);
void append_daemon_gone(struct appender *appender);
/* Waits until everything that was taken is written and reported, some seconds at most. */
void append_drain(struct appender *appender);
void append_tick(struct appender *appender);

#endif
