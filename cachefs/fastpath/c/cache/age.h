/* Age: data of a file that changed less than `settle_ns` before the read, or in the future, are given to the reader and not
 * cached (hazard 25). `age.py` has the same rule and the reasons. */
#pragma once

#include <stdbool.h>

#include "common/clock.h"
#include "common/shared.h"

static inline int64_t settle_ns(const struct shared *shared)
{
    return shared->settle_ns && shared->settle_ns < SETTLE_NS ? (int64_t)shared->settle_ns : SETTLE_NS;
}

/* The time of day, without what the clock was set forward since the daemon started (clock.py says why). */
static inline int64_t trusted_time_ns(const struct shared *shared)
{
    int64_t now = clock_ns(CLOCK_REALTIME), offset = (int64_t)shared->clock_offset_ns;
    int64_t steady = clock_ns(CLOCK_BOOTTIME) + offset;
    return offset && steady < now ? steady : now;
}

/* How long until the file is old enough; 0 if it is. */
static inline int64_t until_old_ns(const struct shared *shared, const struct inode_record *record)
{
    int64_t changed = record->mtime_ns > record->ctime_ns ? record->mtime_ns : record->ctime_ns;
    int64_t old = trusted_time_ns(shared) - settle_ns(shared);
    return changed > old ? changed - old : 0; /* times in the index may be INT64_MIN or INT64_MAX */
}

static inline bool is_young(const struct shared *shared, const struct inode_record *record)
{
    return until_old_ns(shared, record) > 0;
}

/* Data of a young file are about to be given to the kernel: the daemon drops its pages later. One writer at a time (miss_lock).
 * False: the ring is full, and the data must not be given out. */
static inline bool young_note(struct shared *shared, uint64_t inode, const struct inode_record *record)
{
    struct young_files *young = &shared->young;
    uint64_t written = young->written;
    if (written - young->taken >= YOUNG_ENTRIES)
        return false;
    int64_t wait = until_old_ns(shared, record), most = settle_ns(shared);
    uint64_t due = monotonic_ns() + (uint64_t)(wait < most ? wait : most);
    if ((record->flags & UNSETTLED) && record->expires_ns > due) /* so that a reader revalidates the file before it misses them */
        due = record->expires_ns;
    young->entries[written % YOUNG_ENTRIES] = (struct young_file){.inode = inode, .due_ns = due};
    young->written = written + 1;
    return true;
}
