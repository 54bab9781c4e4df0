#include "appender/space.h"

#include "common/format.h"

void space_init(struct space *space, struct shared *shared)
{
    space->shared = shared;
    space->granted = UINT64_MAX;
    shared->pending_bytes = 0;
}

void space_settle(struct space *space)
{
    uint64_t settled = space->shared->settled;
    while (space->unsettled_count && space->unsettled[space->unsettled_first].report <= settled) {
        space->unsettled_bytes -= space->unsettled[space->unsettled_first].bytes;
        space->unsettled_first = (space->unsettled_first + 1) % MAX_UNSETTLED;
        space->unsettled_count--;
    }
    space->shared->pending_bytes = space->unsettled_bytes;
}

bool space_has(struct space *space, uint64_t bytes, uint64_t waiting)
{
    space_settle(space); /* first: what is settled after this is counted twice, not missed */
    return space->shared->committed_bytes + space->unsettled_bytes + waiting + bytes <= space->shared->capacity_bytes;
}

void space_report(struct space *space, uint64_t number, uint64_t bytes)
{
    uint32_t last = (space->unsettled_first + space->unsettled_count++) % MAX_UNSETTLED;
    space->unsettled[last] = (struct unsettled){number, bytes};
    space->unsettled_bytes += bytes;
    space_settle(space); /* it counts as pending before it no longer counts as held */
}

bool space_place(struct space *space, uint64_t bytes, uint64_t *at)
{
    if (space->next + bytes > space->end && space->granted != UINT64_MAX) {
        space->next = space->granted;
        space->end = space->granted + SLAB_BYTES;
        space->granted = UINT64_MAX;
    }
    bool room = space->end && space->next + bytes <= space->end;
    if (room) {
        *at = space->next;
        space->next += bytes;
    }
    return room;
}

bool space_is_short(const struct space *space)
{
    return space->next + SLAB_BYTES / 4 > space->end;
}

void space_grant(struct space *space, uint64_t offset)
{
    space->granted = offset;
    space_leave_slab(space);
}

void space_leave_slab(struct space *space)
{
    space->next = space->end = 0;
}
