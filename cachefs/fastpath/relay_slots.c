#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "relay_parts.h"

#define LOOK_BYTES (8u << 10) /* of the longest request of a read-only mount: two names */

void *slot_data(const struct relay *relay, uint32_t slot)
{
    return relay->data + (size_t)slot * SLOT_BYTES;
}

struct slot_head *head_of(const struct relay *relay, uint32_t slot)
{
    return &relay->shared->slots[slot];
}

enum slot_state state_of(const struct relay *relay, uint32_t slot)
{
    return (enum slot_state)(head_of(relay, slot)->word & 0xff);
}

void set_state(struct relay *relay, uint32_t slot, enum slot_state state)
{
    struct slot_head *head = head_of(relay, slot);
    head->word = (head->word & ~(uint64_t)0xff) | state;
}

void renew(struct relay *relay, uint32_t slot, enum slot_state state)
{
    head_of(relay, slot)->word = ++relay->shared->generation << 8 | state;
}

void free_locked(struct relay *relay, uint32_t slot)
{
    split_drop(relay, slot);
    renew(relay, slot, SLOT_FREE);
    relay->free[relay->free_count++] = slot;
    if (relay->counted[slot]) {
        uncount_locked(relay, slot);
        unpark_locked(relay);
    }
}

void fail_locked(struct relay *relay, uint32_t slot, int error)
{
    set_state(relay, slot, SLOT_IN_DOUBT); /* first: a successor would do what its caller was told had failed */
    reply(relay->device, head_of(relay, slot)->unique, error, NULL, 0);
    free_locked(relay, slot);
}

bool parse_slot(const struct relay *relay, uint32_t slot, struct request *request)
{
    uint32_t length = head_of(relay, slot)->length;
    return length <= SLOT_BYTES && request_parse(slot_data(relay, slot), length, request);
}

uint32_t relay_take_slot(struct relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    uint32_t slot = relay->free_count ? relay->free[--relay->free_count] : NO_SLOT;
    if (slot != NO_SLOT) {
        relay_ready_slot(relay, slot); /* first: a successor would take what its last life left for a request of this one */
        renew(relay, slot, SLOT_READING);
    }
    pthread_mutex_unlock(&relay->lock);
    if (slot != NO_SLOT && !relay->mapped[slot]) {
        memset(slot_data(relay, slot), 0, relay->shared->flags & READ_ONLY ? LOOK_BYTES : SLOT_BYTES);
        relay->mapped[slot] = true;
    }
    return slot;
}

void relay_free_slot(struct relay *relay, uint32_t slot)
{
    pthread_mutex_lock(&relay->lock);
    free_locked(relay, slot);
    pthread_mutex_unlock(&relay->lock);
}

void relay_ready_slot(struct relay *relay, uint32_t slot)
{
    /* A successor tells by the message itself whether one has arrived: nothing runs between its arrival and a kill. */
    struct slot_head *head = head_of(relay, slot);
    memset(slot_data(relay, slot), 0, sizeof(struct fuse_in_header));
    /* An INTERRUPT of the last request would find the process of the next one. */
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
