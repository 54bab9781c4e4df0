#include "relay/slots.h"

#include <string.h>

#include "common/assertion.h"

struct lock relay_lock = LOCK_INIT;

void *slot_data(const struct relay *relay, uint32_t slot)
{
    ASSERT(slot < SLOT_COUNT);
    return relay->data + (size_t)slot * SLOT_BYTES;
}

struct slot_head *head_of(const struct relay *relay, uint32_t slot)
{
    ASSERT(slot < SLOT_COUNT);
    return &relay->shared->slots[slot];
}

enum slot_state state_of(const struct relay *relay, uint32_t slot)
{
    return (enum slot_state)(head_of(relay, slot)->word & 0xff);
}

void set_state_locked(struct relay *relay, uint32_t slot, enum slot_state state)
{
    struct slot_head *head = head_of(relay, slot);
    head->word = (head->word & ~(uint64_t)0xff) | state;
}

void renew_locked(struct relay *relay, uint32_t slot, enum slot_state state)
{
    head_of(relay, slot)->word = ++relay->shared->generation << 8 | state;
}

bool parse_slot(const struct relay *relay, uint32_t slot, struct request *request)
{
    uint32_t length = head_of(relay, slot)->length;
    return length <= SLOT_BYTES && request_parse(slot_data(relay, slot), length, request);
}

void relay_ready_slot(struct relay *relay, uint32_t slot)
{
    /* A successor sees by the message itself whether one has arrived: no code of ours runs between its arrival and a kill. */
    struct slot_head *head = head_of(relay, slot);
    memset(slot_data(relay, slot), 0, sizeof(struct fuse_in_header));
    /* Else an INTERRUPT of the last request would find the process of the next one. */
    atomic_store_explicit(&head->unique, 0, memory_order_relaxed);
    head->length = head->parts = head->attempts = 0;
}

void relay_fill_slot(struct relay *relay, uint32_t slot, uint32_t length, uint64_t unique)
{
    struct slot_head *head = head_of(relay, slot);
    atomic_store_explicit(&head->caller, ((const struct fuse_in_header *)slot_data(relay, slot))->pid, memory_order_relaxed);
    atomic_store_explicit(&head->unique, unique, memory_order_release);
    head->length = length;
}

uint64_t unique_of(const struct relay *relay, uint32_t slot, uint32_t part)
{
    return head_of(relay, slot)->word >> 8 << 24 | (uint64_t)part << 16 | slot;
}

/* --- shares of slots ---------------------------------------------------------------------------------------------- */

uint32_t owner_of(const struct relay *relay, uint32_t slot)
{
    return ((const struct fuse_in_header *)slot_data(relay, slot))->uid;
}

void count_locked(struct relay *relay, uint32_t slot)
{
    if (relay->counted[slot])
        return;
    relay->owners[slot] = owner_of(relay, slot);
    relay->counted[slot] = true;
    shares_take(&relay->slot_shares, relay->owners[slot]);
}

bool uncount_locked(struct relay *relay, uint32_t slot)
{
    if (!relay->counted[slot])
        return false;
    relay->counted[slot] = false;
    shares_give(&relay->slot_shares, relay->owners[slot]);
    if (relay->counted_passed[slot])
        shares_give(&relay->passed_shares, relay->owners[slot]);
    relay->counted_passed[slot] = false;
    return true;
}

void count_passed_locked(struct relay *relay, uint32_t slot)
{
    count_locked(relay, slot);
    if (!relay->counted_passed[slot])
        shares_take(&relay->passed_shares, relay->owners[slot]);
    relay->counted_passed[slot] = true;
}
