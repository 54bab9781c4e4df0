/* Where in the blob the next record goes, and whether the capacity has room for it.
 *
 * Records lie in slabs that the daemon grants, and never cross the end of one. A record that was reported is pending: it
 * counts against the capacity here until its report is resolved (`resolved` of the shared memory): the daemon has committed
 * it, and the index counts it, or it never will. */
#pragma once

#include "common/lock.h"
#include "common/shared.h"

#define MAX_PENDING (1u << 16) /* reports that wait for a commit */

struct space { /* under appender_lock */
    struct shared *shared;
    uint64_t next, end; /* of the slab; equal: there is none */
    uint64_t granted;   /* offset of a slab that was granted and not begun; UINT64_MAX: none */
    struct pending { uint64_t report, bytes; } pending[MAX_PENDING]; /* a ring */
    uint32_t pending_first, pending_count;
    uint64_t pending_bytes;
};

void space_init(struct space *space, struct shared *shared);
/* Records whose reports are resolved no longer count as pending. */
void space_update_locked(struct space *space) REQUIRES(appender_lock);
/* `waiting`: bytes of other records that will be appended first. */
bool space_has_locked(struct space *space, uint64_t bytes, uint64_t waiting) REQUIRES(appender_lock);
/* A record of so many bytes was reported under this number. */
void space_report_locked(struct space *space, uint64_t number, uint64_t bytes) REQUIRES(appender_lock);

/* The place of a record. False: no slab has room. */
bool space_place_locked(struct space *space, uint64_t bytes, uint64_t *at) REQUIRES(appender_lock);
/* Is the slab nearly full? */
bool space_is_short_locked(const struct space *space) REQUIRES(appender_lock);
/* Another slab; UINT64_MAX: none. The rest of the current one is not used: the daemon has a reason to grant another. */
void space_grant_locked(struct space *space, uint64_t offset) REQUIRES(appender_lock);
/* Nothing more is appended to this slab. */
void space_leave_slab_locked(struct space *space) REQUIRES(appender_lock);
