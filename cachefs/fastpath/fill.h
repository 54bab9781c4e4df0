/* Misses: fetched from the source once however many wait, answered, and only then appended to the blob.
 *
 * A fetch belongs to nobody: readers that go away neither cancel nor spoil it. It is compared with what the index says
 * before and after the read; a difference, an error and whatever else is unusual makes it Python's: the requests that
 * wait are passed on as they came. A source that hangs costs its readers ETIMEDOUT and a fetching thread each, never a
 * hit (hazard 20).
 *
 * What was fetched is appended by one thread, if there is room, and reported to the daemon, which syncs the blob and
 * commits. Until then it is found in the table here; nothing of it is believed by anybody else (hazard 17). */
#ifndef CACHEFS_FILL_H
#define CACHEFS_FILL_H

#include "control.h"
#include "serve.h"

/* NULL where nothing is cached: misses are Python's. 0 or an errno. */
int fill_start(struct fastpath *fastpath, struct control_socket *control);

/* A READ that the blob cannot answer. It may be answered before this returns, or later; the slot is taken then. */
enum outcome fill_read(struct worker *worker, const struct inode_record *record, const struct request *request);

/* True if it was found and answered. */
bool fill_interrupt(struct fill *fill, uint64_t unique);
/* The daemon grants a slab of the blob: from `offset` to the end of it we are the only writer. */
void fill_slab(struct fill *fill, uint64_t offset);
/* The daemon has evicted all that its policy gives away, for the request for room of this number. */
void fill_room(struct fill *fill, uint64_t answered);
/* What the daemon would like to have fetched, when no reader minds. */
void fill_wish(struct fill *fill, const struct wish *wishes, size_t count);
void fill_attached(struct fill *fill, bool same);
void fill_daemon_gone(struct fill *fill);
void fill_drain(struct fill *fill);
/* Once in a while: what takes too long is answered ETIMEDOUT. */
void fill_tick(struct fill *fill);

#endif
