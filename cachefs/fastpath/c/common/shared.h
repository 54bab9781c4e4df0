/* The memory that the daemon and the fast path share: cachefs/contract/shared.py has the layout and the meaning. */
#pragma once

#include "common/latency.h"

#define ACCESS_UNIT_MASK ((1u << ACCESS_UNIT_BITS) - 1)

#define SHARED_HEAD_BYTES ((sizeof(struct shared) + 4095) & ~(size_t)4095)
#define SHARED_SLOTS_END (SHARED_HEAD_BYTES + (size_t)SLOT_COUNT * SLOT_BYTES)
#define SHARED_BYTES (SHARED_SLOTS_END + sizeof(struct volumes))

static inline struct volumes *shared_volumes(const struct shared *shared)
{
    return (struct volumes *)((uintptr_t)shared + SHARED_SLOTS_END);
}

