/* A piece of a file on its way from the source to its readers and to the blob, and queues of them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "cache/index.h"

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
    bool ahead; /* it was read ahead, and no READ has asked for it yet */
    uint8_t *payload;
    struct extent extent;
    char path[];
};

struct fetch_queue { /* linked by `queue_next`; a fetch is in one at most */
    struct fetch *first, *last;
};

struct fetch *fetch_new(const struct inode_record *record, uint64_t inode, const char *path);
void queue_push(struct fetch_queue *queue, struct fetch *fetch);
/* NULL: it is empty. */
struct fetch *queue_pop(struct fetch_queue *queue);
void queue_remove(struct fetch_queue *queue, struct fetch *fetch);
