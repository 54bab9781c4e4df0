/* What becomes of a fetch: a record of the blob, as docs/FORMAT.md has it, and the report of it to the daemon. */
#pragma once

#include "appender/fetch.h"
#include "appender/stage.h"

/* Of a record with this much payload. */
uint64_t record_bytes(uint32_t length);
/* Puts the record of what was fetched at `at`. `extent`: what the index is to know of it. False, with errno. */
bool put_record(struct stage *stage, const struct fetch *fetch, uint64_t at, uint64_t seed, struct extent *extent);

#define MAX_REPORT_BYTES (sizeof(struct filled) + MAX_CHECKSUMS * sizeof(uint64_t))
/* Writes one report, at most MAX_REPORT_BYTES; returns its length. */
uint32_t encode_report(uint8_t *out, const struct fetch *fetch, const struct extent *extent, uint64_t number);
