/* Fetches that are under way, or done and not in the index yet. The caller holds the lock of `fill.c`. */
#ifndef CACHEFS_FILL_TABLE_H
#define CACHEFS_FILL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index.h"
#include "shares.h"

#define TABLE_BUCKETS 4096

struct waiter { /* a READ that waits for a fetch; its slot is ours */
    struct waiter *next;
    uint64_t unique, offset, since_ns;
    uint32_t slot, length, owner;
};

enum fetch_state {
    FETCH_QUEUED,
    FETCH_FETCHING,
    FETCH_ABANDONED, /* took too long; nobody waits any more */
    FETCH_FETCHED,   /* `payload` is there */
    FETCH_APPENDED,  /* `extent` says where; the payload is gone */
};

struct fetch {
    struct fetch *bucket_next, *older, *newer; /* in the table; from oldest to newest */
    struct fetch *queue_next, *settle_next;
    struct waiter *waiters;
    struct inode_record record;
    uint64_t inode, offset, since_ns, report;
    uint32_t length, owner; /* `owner`: whose share it takes a place of (shares.h): who asked first, or waits for it */
    enum fetch_state state;
    int references; /* of those who read `payload`, its owner included */
    bool cached;    /* to be appended; else just the bytes that were asked for */
    bool young;     /* the file was, when this began */
    bool in_table;
    bool streams; /* somebody reads on and on: what follows will be wanted, too */
    bool touched; /* a READ has asked for it; else it was read ahead */
    uint8_t *payload;
    struct extent extent;
    char path[];
};

struct fetch_queue { /* linked by `queue_next`; a fetch is in one at most */
    struct fetch *first, *last;
};

void queue_push(struct fetch_queue *queue, struct fetch *fetch);
/* NULL: it is empty. */
struct fetch *queue_pop(struct fetch_queue *queue);
/* The first fetch that has a waiter whose share has room; that waiter becomes its owner. NULL: there is none. */
struct fetch *queue_pop_fair(struct fetch_queue *queue, const struct shares *shares);
void queue_remove(struct fetch_queue *queue, struct fetch *fetch);

struct fill_table {
    struct fetch *buckets[TABLE_BUCKETS];
    struct fetch *oldest, *newest;
    struct fetch *settle_first, *settle_last; /* FETCH_APPENDED, in the order of their reports */
};

struct fetch *fetch_new(const struct inode_record *record, uint64_t inode, const char *path);
void fetch_release(struct fetch *fetch);

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

#endif
