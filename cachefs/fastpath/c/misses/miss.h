/* Misses: fetched from the source once, however many READs wait, then answered, and only then appended to the blob.
 *
 * A fetch belongs to no reader: a reader that goes away neither cancels nor spoils it. The source is compared with the index
 * before and after the read. A difference, an error or anything else unusual makes it Python's: the waiting requests are
 * passed on as they came. A source that hangs costs its readers ETIMEDOUT and one thread each, never a hit (hazard 20).
 *
 * One thread appends what was fetched, if there is room, and reports it to the daemon, which syncs the blob and commits.
 * Until then the data are found in the table here, and nothing else uses what was appended (hazard 17). */
#pragma once

#include "worker/worker.h"

/* `fastpath->misses` stays NULL where nothing is cached: Python serves misses. 0 or an errno. */
int miss_start(struct fastpath *fastpath, int blob_fd);

/* A READ that the blob cannot answer. Its slot is taken: it may be answered before this returns, or later. */
enum outcome miss_read(struct worker *worker, const struct inode_record *record, const struct request *request)
    EXCLUDES(miss_lock);

/* True: the request was found and answered. */
bool miss_interrupt(struct misses *misses, uint64_t unique) EXCLUDES(miss_lock);
/* Called now and then: READs that take too long are answered ETIMEDOUT. */
void miss_tick(struct misses *misses) EXCLUDES(miss_lock);
