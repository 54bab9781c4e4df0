/* Misses: fetched from the source once however many wait, answered, and only then appended to the blob.
 *
 * A fetch belongs to nobody: readers that go away neither cancel nor spoil it. It is compared with what the index says
 * before and after the read; a difference, an error and whatever else is unusual makes it Python's: the requests that
 * wait are passed on as they came. A source that hangs costs its readers ETIMEDOUT and a fetching thread each, never a
 * hit (hazard 20).
 *
 * What was fetched is appended by one thread, if there is room, and reported to the daemon, which syncs the blob and
 * commits. Until then it is found in the table here; nothing of it is believed by anybody else (hazard 17). */
#pragma once

#include "worker/worker.h"

/* NULL where nothing is cached: misses are Python's. 0 or an errno. */
int fill_start(struct fastpath *fastpath, int blob_fd);

/* A READ that the blob cannot answer. It may be answered before this returns, or later; the slot is taken then. */
enum outcome fill_read(struct worker *worker, const struct inode_record *record, const struct request *request);

/* True if it was found and answered. */
bool fill_interrupt(struct fill *fill, uint64_t unique);
/* Once in a while: what takes too long is answered ETIMEDOUT. */
void fill_tick(struct fill *fill);
