/* A small file's bytes, read while its job still digests the answer to LOOKUP.
 *
 * One job that reads file after file waits for the disk and for two wake-ups a file, one after the other. Whoever has the
 * turn to listen would only wait meanwhile: it reads what the next READ will ask for. That is a guess, so it is made only
 * while guesses come true: each look-up of a file was followed by a READ of that file, STREAK times in a row. A walk
 * that reads nothing costs one read in vain.
 *
 * All of this belongs to who has the turn. With several readers at once the turn is given away for a READ, and nothing is
 * read ahead: there the disk is busy anyway. */
#pragma once

#include "cache/blob.h"
#include "cache/index.h"

struct ahead {
    uint8_t *scratch; /* of QUICK_BYTES */
    uint64_t looked_up; /* an inode that nobody has read since; 0: none */
    uint32_t streak;
    uint64_t inode; /* whose first bytes, of this extent, are in `data`; 0: nobody's */
    struct extent_record extent;
    const uint8_t *data;
};

/* A regular file was looked up. */
void ahead_looked_up(struct ahead *ahead, uint64_t inode);
/* It is read. What there is of it from the start, at least `length` bytes; NULL: nothing, or not of this extent. */
const void *ahead_read(struct ahead *ahead, uint64_t inode, const struct extent *extent, uint32_t length);
/* Reads what will probably be asked for next. False: there is no telling, or nothing to read. */
bool ahead_guess(struct ahead *ahead, struct view *view, const struct blob *blob);
