/* Reading files of the source, beneath its directory handle. */
#pragma once

#include <stdint.h>

#include "cache/index.h"
#include "common/shared.h"

/* `length` bytes of a file from `offset`, for `source_free`. NULL: they cannot be had, or the file is not,
 * after the read, the version that `expected` says. */
uint8_t *source_read(const struct shared *shared, int directory, const char *path, const struct inode_record *expected,
                     uint64_t offset, uint32_t length, struct counters *counters);
void source_free(uint8_t *payload, uint32_t length);
