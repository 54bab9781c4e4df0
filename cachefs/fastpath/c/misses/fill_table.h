/* Fetches that are under way, or done and not in the index yet. The caller holds the lock of `struct fill` (fetching.h). */
#pragma once

#include "appender/fetch.h"
#include "common/shares.h"

#define TABLE_BUCKETS 4096

struct fill_table {
    struct fetch *buckets[TABLE_BUCKETS];
    struct fetch *oldest, *newest;
    struct fetch *settle_first, *settle_last; /* FETCH_APPENDED, in the order of their reports */
};

/* Drops a reference; the last one frees the payload. */
void fetch_release(struct fetch *fetch);
/* The first fetch that has a waiter whose share has room; that waiter becomes its owner. NULL: there is none. */
struct fetch *queue_pop_fair(struct fetch_queue *queue, const struct shares *shares);

/* The fetch, to be cached, of all bytes from `start` to `end`. */
struct fetch *table_find(struct fill_table *table, uint64_t inode, uint64_t version, uint64_t start, uint64_t end);
/* Where the first fetch that begins in [from, to) begins; `to` if there is none. No further than CHUNK_BYTES. */
uint64_t table_next(struct fill_table *table, uint64_t inode, uint64_t version, uint64_t from, uint64_t to);
void table_add(struct fill_table *table, struct fetch *fetch);
void table_remove(struct fill_table *table, struct fetch *fetch);
struct fetch *table_oldest_unfetched(struct fill_table *table);
struct waiter *table_take_waiter(struct fill_table *table, uint64_t unique);
void table_settle_later(struct fill_table *table, struct fetch *fetch);
/* Drops what was reported under numbers up to this one. */
void table_settle(struct fill_table *table, uint64_t number);
