/* A record of the blob, as docs/FORMAT.md has it. */
#ifndef CACHEFS_RECORD_H
#define CACHEFS_RECORD_H

#include "fill_table.h"
#include "stage.h"

/* Of a record with this much payload. */
uint64_t record_bytes(uint32_t length);
/* Puts the record of what was fetched at `at`. `extent`: what the index is to know of it. False, with errno. */
bool put_record(struct stage *stage, const struct fetch *fetch, uint64_t at, uint64_t seed, struct extent *extent);

#endif
