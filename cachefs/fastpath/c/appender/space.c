#include "appender/space.h"

#include "common/assertion.h"

void space_init(struct space *space, struct shared *shared)
{
    space->shared = shared;
    space->granted = UINT64_MAX;
    shared->pending_bytes = 0;
}

void space_update_locked(struct space *space)
{
    uint64_t resolved = space->shared->resolved;
    while (space->pending_count && space->pending[space->pending_first].report <= resolved) {
        ASSERT(space->pending_bytes >= space->pending[space->pending_first].bytes);
        space->pending_bytes -= space->pending[space->pending_first].bytes;
        space->pending_first = (space->pending_first + 1) % MAX_PENDING;
        space->pending_count--;
    }
    space->shared->pending_bytes = space->pending_bytes;
}

bool space_has_locked(struct space *space, uint64_t bytes, uint64_t waiting)
{
    space_update_locked(space); /* first: what is resolved after this counts twice, and is not missed */
    return space->shared->committed_bytes + space->pending_bytes + waiting + bytes <= space->shared->capacity_bytes;
}

void space_report_locked(struct space *space, uint64_t number, uint64_t bytes)
{
    ASSERT(space->pending_count < MAX_PENDING);
    uint32_t last = (space->pending_first + space->pending_count++) % MAX_PENDING;
    space->pending[last] = (struct pending){number, bytes};
    space->pending_bytes += bytes;
    space_update_locked(space); /* it counts as pending before it stops to count as buffered */
}

bool space_place_locked(struct space *space, uint64_t bytes, uint64_t *at)
{
    if (space->next + bytes > space->end && space->granted != UINT64_MAX) {
        space->next = space->granted;
        space->end = space->granted + SLAB_BYTES;
        space->granted = UINT64_MAX;
    }
    ASSERT(space->next <= space->end && bytes <= SLAB_BYTES);
    if (!space->end || space->next + bytes > space->end)
        return false;
    *at = space->next;
    space->next += bytes;
    return true;
}

bool space_is_short_locked(const struct space *space)
{
    return space->next + SLAB_BYTES / 4 > space->end;
}

void space_grant_locked(struct space *space, uint64_t offset)
{
    space->granted = offset;
    space_leave_slab_locked(space);
}

void space_leave_slab_locked(struct space *space)
{
    space->next = space->end = 0;
}
