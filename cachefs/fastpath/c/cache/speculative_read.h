/* A small file's bytes are read while its job still processes the answer to LOOKUP.
 *
 * A job that reads file after file waits for the disk and for two wake-ups a file, one after the other. The leader would
 * only wait meanwhile, so it reads what the next READ will ask for. That is a guess. It is made only while guesses are
 * right: each look-up of a file was followed by a READ of that file, STREAK times in a row. A tree walk that reads no data
 * costs one useless read.
 *
 * All of this belongs to the leader. With concurrent readers the leader resigns for a READ, and nothing is read
 * speculatively: the disk is busy then. */
#pragma once

#include "cache/blob.h"
#include "cache/index.h"
#include "common/lock.h"

struct speculative_read { /* under leader_lock */
    uint8_t *scratch;   /* of QUICK_BYTES */
    uint64_t looked_up; /* the inode of the last LOOKUP, until it is read; 0: none */
    uint32_t streak;
    uint64_t inode; /* `data` are its first bytes, of this extent; 0: there are no data */
    struct extent_record extent;
    const uint8_t *data;
};

/* A regular file was looked up. */
void speculative_read_lookup(struct speculative_read *speculation, uint64_t inode) REQUIRES(leader_lock);
/* The file is read. Returns its first bytes, at least `length` of them; NULL: there are none, or they are of another extent. */
const void *speculative_read_data(struct speculative_read *speculation, uint64_t inode, const struct extent *extent,
                                  uint32_t length) REQUIRES(leader_lock);
/* Reads what the next READ will probably ask for. False: there is no guess, or nothing to read. */
bool speculative_read_next(struct speculative_read *speculation, struct view *view, const struct blob *blob)
    REQUIRES(leader_lock);
