/* The fetches that are under way, or done and not in the index yet. */
#pragma once

#include "appender/fetch.h"
#include "common/lock.h"
#include "common/shares.h"

#define TABLE_BUCKETS 4096

struct fetch_table { /* under miss_lock */
    struct fetch *buckets[TABLE_BUCKETS];
    struct fetch *oldest, *newest;
    struct fetch_queue pending; /* FETCH_APPENDED, in the order of their reports */
};

/* Drops a reference; the last one frees the payload. */
void fetch_release_locked(struct fetch *fetch) REQUIRES(miss_lock);
/* The first fetch that has a waiter whose share has room; that waiter becomes its owner. NULL: there is none. */
struct fetch *queue_pop_fair_locked(struct fetch_queue *queue, const struct shares *shares) REQUIRES(miss_lock);

/* The fetch, to be cached, of all bytes from `start` to `end`. */
struct fetch *find_fetch_locked(struct fetch_table *table, uint64_t inode, uint64_t version, uint64_t start, uint64_t end)
    REQUIRES(miss_lock);
/* The start of the first fetch that begins in [from, to); `to` if there is none. The range is CHUNK_BYTES at most. */
uint64_t next_fetch_start_locked(struct fetch_table *table, uint64_t inode, uint64_t version, uint64_t from, uint64_t to)
    REQUIRES(miss_lock);
void add_to_table_locked(struct fetch_table *table, struct fetch *fetch) REQUIRES(miss_lock);
void remove_from_table_locked(struct fetch_table *table, struct fetch *fetch) REQUIRES(miss_lock);
struct fetch *oldest_unfetched_locked(struct fetch_table *table) REQUIRES(miss_lock);
struct waiter *take_waiter_locked(struct fetch_table *table, uint64_t unique) REQUIRES(miss_lock);
void add_pending_locked(struct fetch_table *table, struct fetch *fetch) REQUIRES(miss_lock);
/* Drops the fetches that were reported under numbers up to this one. */
void resolve_pending_locked(struct fetch_table *table, uint64_t number) REQUIRES(miss_lock);
