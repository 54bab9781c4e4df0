/* What is written of a fetch: a record of the blob (docs/FORMAT.md), and the report of it to the daemon. */
#pragma once

#include "appender/blob_writer.h"
#include "appender/fetch.h"

/* The size of a record with this much payload. */
uint64_t record_bytes(uint32_t length);
/* Puts the record of a fetch at `at`. `extent`: what the index is to know of it. False, with errno. */
bool put_record(struct blob_writer *writer, const struct fetch *fetch, uint64_t at, uint64_t seed, struct extent *extent);

#define MAX_REPORT_BYTES (sizeof(struct filled) + MAX_CHECKSUMS * sizeof(uint64_t))
/* Writes one report, at most MAX_REPORT_BYTES; returns its length. */
uint32_t encode_report(uint8_t *out, const struct fetch *fetch, const struct extent *extent, uint64_t number);
