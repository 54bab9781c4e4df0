/* How much a READ of a large file fetches: policies/prefetch/sequential.py has the rule and the reasons. */
#pragma once

#include "cache/index.h"
#include "misses/fetch_table.h"

/* What is known of one version of a file: the pieces in the table and those in the index. */
struct known {
    struct fetch_table *table;
    struct view *view; /* begun after the lock was taken: what has left the table is in the index. NULL: without the index */
    uint64_t inode, version;
};

/* The end of the known range that begins at `start`; `end` at most. */
uint64_t known_until_locked(const struct known *known, uint64_t start, uint64_t end) REQUIRES(miss_lock);

struct window {
    uint64_t start, end;
    bool streams; /* a whole chunk of a file that is read sequentially */
};

/* For a READ from `start` to `end`, which is not known. CHUNK_BYTES at most. */
struct window window_of_locked(const struct known *known, uint64_t size, uint64_t start, uint64_t end) REQUIRES(miss_lock);
/* The window after one that streams. Empty: those bytes are known, or the file ends. */
struct window window_after_locked(const struct known *known, uint64_t size, uint64_t end) REQUIRES(miss_lock);
