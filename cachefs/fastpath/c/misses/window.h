/* How much a READ of a large file fetches: policies/prefetch/sequential.py has the rule and the reasons. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "cache/index.h"
#include "misses/fill_table.h"

/* What is known of one version of a file: what the table has, and the index. The caller holds the table's lock. */
struct known {
    struct fill_table *table;
    struct view *view; /* begun after the lock was taken: what has left the table is in the index. NULL: not believed */
    uint64_t inode, version;
};

/* Up to where everything from `start` on is known; `end` at most. */
uint64_t known_until(const struct known *known, uint64_t start, uint64_t end);

struct window {
    uint64_t start, end;
    bool streams; /* it is a whole chunk of a file that somebody reads on and on */
};

/* For a READ from `start` to `end`, which is not known. No longer than CHUNK_BYTES. */
struct window window_of(const struct known *known, uint64_t size, uint64_t start, uint64_t end);
/* What comes after a window that streams. Empty: that is known, or the file ends. */
struct window window_after(const struct known *known, uint64_t size, uint64_t end);
