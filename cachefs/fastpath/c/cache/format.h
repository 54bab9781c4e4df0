/* Formats on disk, of the index and the blob. The structs are in cachefs/contract; docs/FORMAT.md describes them. */
#pragma once

#include "common/contract.h"

static inline uint32_t block_count(uint32_t length)
{
    return (uint32_t)((length + (uint64_t)BLOCK_BYTES - 1) / BLOCK_BYTES);
}

