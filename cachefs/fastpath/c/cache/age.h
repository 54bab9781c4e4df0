/* Age: data of a file whose record is YOUNG are given to the reader and not cached (hazard 25). The daemon decides which are;
 * `validity.py` has the reasons. */
#pragma once

#include <stdbool.h>

#include "common/clock.h"
#include "common/shared.h"

/* Data of a young file are about to be given to the kernel: the daemon drops its pages later, when a write() that is under way
 * has ended. One writer at a time (miss_lock). False: the ring is full, and the data must not be given out. */
static inline bool young_note(struct shared *shared, uint64_t inode, const struct inode_record *record)
{
    struct young_files *young = &shared->young;
    uint64_t written = young->written;
    if (written - young->taken >= YOUNG_ENTRIES)
        return false;
    uint64_t settle = shared->settle_ns && shared->settle_ns < SETTLE_NS ? shared->settle_ns : SETTLE_NS;
    uint64_t due = monotonic_ns() + settle;
    if ((record->flags & UNSETTLED) && record->expires_ns > due) /* so that a reader revalidates the file before it misses them */
        due = record->expires_ns;
    young->entries[written % YOUNG_ENTRIES] = (struct young_file){.inode = inode, .due_ns = due};
    young->written = written + 1;
    return true;
}
