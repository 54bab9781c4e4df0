/* A piece of a file on its way from the source to its readers and to the blob, and queues of such pieces. */
#pragma once

#include "cache/index.h"
#include "common/lock.h"

struct waiter { /* a READ that waits for a fetch; its slot belongs to the fetch */
    struct waiter *next;
    uint64_t unique, offset, since_ns;
    uint32_t slot, length, owner, group; /* `owner`, `group`: ids of the reader */
};

enum fetch_state {
    FETCH_QUEUED,
    FETCH_FETCHING,
    FETCH_ABANDONED, /* it took too long, and its waiters are answered */
    FETCH_FETCHED,   /* `payload` is there */
    FETCH_APPENDED,  /* `extent` says where; the payload is freed */
};

struct fetch {
    /* Constant once the fetch is in the table. */
    struct inode_record record;
    uint64_t inode, offset, since_ns;
    uint32_t length;
    uint32_t reader, reader_group; /* ids of the first reader; 0: none, or root */
    bool cached; /* to be appended; else it is just the bytes of one READ */
    bool young;  /* the file was young when this began */
    /* Written by the thread that fetches, and constant from FETCH_FETCHED on, until the last reference is dropped. */
    uint8_t *payload;
    struct fetch *queue_next; /* under the lock of the queue */

    struct fetch *bucket_next GUARDED_BY(miss_lock);
    struct fetch *older GUARDED_BY(miss_lock), *newer GUARDED_BY(miss_lock);
    struct waiter *waiters GUARDED_BY(miss_lock);
    uint32_t owner GUARDED_BY(miss_lock); /* it takes a place of this owner's share (shares.h): a reader that waits */
    enum fetch_state state GUARDED_BY(miss_lock);
    int references GUARDED_BY(miss_lock); /* of the threads that read `payload`, and of its owner */
    bool in_table GUARDED_BY(miss_lock);
    bool readahead GUARDED_BY(miss_lock); /* begun by readahead, and no READ has asked for it yet */
    struct extent extent GUARDED_BY(miss_lock);
    uint64_t report GUARDED_BY(miss_lock);
    char path[];
};

struct fetch_queue { /* linked by `queue_next`; a fetch is in one queue at most. Its owner's lock guards it */
    struct fetch *first, *last;
};

struct fetch *fetch_new(const struct inode_record *record, uint64_t inode, const char *path);
void queue_push(struct fetch_queue *queue, struct fetch *fetch);
/* NULL: it is empty. */
struct fetch *queue_pop(struct fetch_queue *queue);
void queue_remove(struct fetch_queue *queue, struct fetch *fetch);
