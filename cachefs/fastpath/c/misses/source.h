/* Reads files of the source, beneath its directory handle. */
#pragma once

#include "cache/index.h"
#include "common/shared.h"

/* `length` bytes of a file from `offset`; free them with `source_free`. NULL: the read failed, or after the read the file is
 * not the version of `expected`. `user`, `group`: of the process that reads; 0: none, or root. */
uint8_t *source_read(const struct shared *shared, int directory, const char *path, const struct inode_record *expected,
                     uint64_t offset, uint32_t length, uint32_t user, uint32_t group, struct counters *counters);
void source_free(uint8_t *payload, uint32_t length);
