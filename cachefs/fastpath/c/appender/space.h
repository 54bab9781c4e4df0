/* Where in the blob the next record goes, and whether the capacity has room for it. The caller holds the appender's lock.
 *
 * Records lie in slabs that the daemon grants, and never cross the end of one. What was reported counts against the
 * capacity here until the daemon has committed it (`settled` of the shared memory); from then on the index counts it. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/shared.h"

#define MAX_UNSETTLED (1u << 16) /* reports that wait for a commit */

struct space {
    struct shared *shared;
    uint64_t next, end; /* of the slab; equal: there is none */
    uint64_t granted;   /* offset of a slab that was granted and not begun, UINT64_MAX: none */
    struct unsettled { uint64_t report, bytes; } unsettled[MAX_UNSETTLED]; /* a ring */
    uint32_t unsettled_first, unsettled_count;
    uint64_t unsettled_bytes;
};

void space_init(struct space *space, struct shared *shared);
/* What was reported and is settled by now no longer counts as pending: the index counts it. */
void space_settle(struct space *space);
/* `waiting`: of other records that will be appended first. */
bool space_has(struct space *space, uint64_t bytes, uint64_t waiting);
/* A record of so many bytes was reported under this number. */
void space_report(struct space *space, uint64_t number, uint64_t bytes);

/* The place of a record. False: no slab has room. */
bool space_place(struct space *space, uint64_t bytes, uint64_t *at);
/* Is the slab nearly full? */
bool space_is_short(const struct space *space);
/* Another slab, UINT64_MAX: none. The rest of the last one is not used: the daemon has a reason to grant another. */
void space_grant(struct space *space, uint64_t offset);
/* Nothing is appended behind what there is in this slab. */
void space_leave_slab(struct space *space);
