#include "relay/lot.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "common/assertion.h"
#include "kernel/reply.h"
#include "relay/slots.h"
#include "relay/split.h"

#define READ_ONLY_BYTES (8u << 10) /* of the longest request of a read-only mount: two names */

static struct fuse_in_header *parked_header(const struct relay *relay, uint32_t place)
{
    ASSERT(place < PARKED_COUNT);
    return (struct fuse_in_header *)relay->shared->parked[place].message;
}

/* --- work: requests in slots that no thread serves yet -------------------------------------------------------------- */

void add_work_locked(struct relay *relay, uint32_t slot)
{
    ASSERT(relay->work_count < SLOT_COUNT);
    relay->work[(relay->work_head + relay->work_count) % SLOT_COUNT] = slot;
    if (relay->work_count++ == 0) {
        uint64_t one = 1;
        if (write(relay->work_ready, &one, sizeof one) < 0)
            return; /* the eventfd is readable already */
    }
}

uint32_t relay_next_work(struct relay *relay)
{
    if (!relay->work_count)
        return NO_SLOT;
    lock_take(&relay_lock);
    uint32_t slot = NO_SLOT;
    if (relay->work_count) {
        slot = relay->work[relay->work_head];
        relay->work_head = (relay->work_head + 1) % SLOT_COUNT;
        if (--relay->work_count == 0) {
            uint64_t ready;
            if (read(relay->work_ready, &ready, sizeof ready) < 0)
                ready = 0; /* the eventfd was not readable */
        }
    }
    lock_release(&relay_lock);
    return slot;
}

/* --- the lot ------------------------------------------------------------------------------------------------------- */

static void link_last_locked(struct relay *relay, uint32_t place) REQUIRES(relay_lock)
{
    struct lot *lot = &relay->lot;
    lot->next[place] = NO_SLOT;
    lot->previous[place] = lot->last;
    *(lot->last == NO_SLOT ? &lot->first : &lot->next[lot->last]) = place;
    lot->last = place;
    lot->owners[place] = parked_header(relay, place)->uid;
    shares_take(&lot->shares, lot->owners[place]);
}

static void leave_locked(struct relay *relay, uint32_t place) REQUIRES(relay_lock)
{
    struct lot *lot = &relay->lot;
    ASSERT(lot->free_count < PARKED_COUNT);
    shares_give(&lot->shares, lot->owners[place]);
    *(lot->previous[place] == NO_SLOT ? &lot->first : &lot->next[lot->previous[place]]) = lot->next[place];
    *(lot->next[place] == NO_SLOT ? &lot->last : &lot->previous[lot->next[place]]) = lot->previous[place];
    relay->shared->parked[place].length = 0;
    lot->free[lot->free_count++] = place;
}

/* The oldest request whose owner may have a slot. */
static uint32_t next_parked_locked(const struct relay *relay) REQUIRES(relay_lock)
{
    uint32_t full[16]; /* owners whose shares are full; few owners have most of the requests */
    uint32_t count = 0;
    for (uint32_t place = relay->lot.first; place != NO_SLOT; place = relay->lot.next[place]) {
        uint32_t owner = relay->lot.owners[place], i = 0;
        while (i < count && full[i] != owner)
            i++;
        if (i < count)
            continue;
        if (!shares_full(&relay->slot_shares, owner) && !shares_full(&relay->passed_shares, owner))
            return place;
        if (count < sizeof full / sizeof *full)
            full[count++] = owner;
        if (count == relay->lot.shares.count)
            return NO_SLOT; /* the shares of all owners are full */
    }
    return NO_SLOT;
}

/* Slots have become free. */
static void unpark_locked(struct relay *relay) REQUIRES(relay_lock)
{
    uint32_t place;
    while (relay->lot.first != NO_SLOT && relay->free_count && (place = next_parked_locked(relay)) != NO_SLOT) {
        struct parked *parked = &relay->shared->parked[place];
        uint32_t slot = relay->free[--relay->free_count], length = parked->length;
        struct fuse_in_header *header = slot_data(relay, slot);
        ASSERT(state_of(relay, slot) == SLOT_FREE && length >= sizeof *header && length <= PARKED_BYTES);
        relay_ready_slot(relay, slot);
        renew_locked(relay, slot, SLOT_READING);
        uint64_t unique = parked_header(relay, place)->unique;
        /* The unique last: a successor that finds it in the slot finds the rest of the request, too. */
        memcpy(header + 1, parked->message + sizeof *header, length - sizeof *header);
        struct fuse_in_header copy = *parked_header(relay, place);
        copy.unique = 0;
        *header = copy;
        *(volatile uint64_t *)&header->unique = unique;
        relay_fill_slot(relay, slot, length, unique);
        leave_locked(relay, place);
        count_passed_locked(relay, slot); /* most requests of the lot are passed on */
        add_work_locked(relay, slot);
    }
}

/* --- slots are taken and given back ---------------------------------------------------------------------------------- */

void free_locked(struct relay *relay, uint32_t slot)
{
    ASSERT(relay->free_count < SLOT_COUNT);
    split_drop_locked(relay, slot);
    renew_locked(relay, slot, SLOT_FREE);
    relay->free[relay->free_count++] = slot;
    if (uncount_locked(relay, slot))
        unpark_locked(relay);
}

void fail_locked(struct relay *relay, uint32_t slot, int error)
{
    set_state_locked(relay, slot, SLOT_IN_DOUBT); /* first: a successor must not do what has been answered with an error */
    reply(relay->device, head_of(relay, slot)->unique, error, NULL, 0);
    free_locked(relay, slot);
}

uint32_t relay_take_slot(struct relay *relay)
{
    lock_take(&relay_lock);
    uint32_t slot = relay->free_count ? relay->free[--relay->free_count] : NO_SLOT;
    if (slot != NO_SLOT) {
        ASSERT(state_of(relay, slot) == SLOT_FREE);
        relay_ready_slot(relay, slot); /* first: a successor would take what the last generation left for a request of this one */
        renew_locked(relay, slot, SLOT_READING);
    }
    lock_release(&relay_lock);
    if (slot != NO_SLOT && !relay->mapped[slot]) {
        memset(slot_data(relay, slot), 0, relay->shared->flags & READ_ONLY ? READ_ONLY_BYTES : SLOT_BYTES);
        relay->mapped[slot] = true;
    }
    return slot;
}

void relay_free_slot(struct relay *relay, uint32_t slot)
{
    lock_take(&relay_lock);
    free_locked(relay, slot);
    lock_release(&relay_lock);
}

bool claim_locked(struct relay *relay, uint32_t slot)
{
    if (!relay->counted[slot] && shares_full(&relay->slot_shares, owner_of(relay, slot)))
        return false;
    count_locked(relay, slot);
    return true;
}

bool relay_claim(struct relay *relay, uint32_t slot)
{
    lock_take(&relay_lock);
    bool claimed = claim_locked(relay, slot);
    lock_release(&relay_lock);
    return claimed;
}

void relay_unclaim(struct relay *relay, uint32_t slot)
{
    if (!relay->counted[slot]) /* the slot belongs to the caller: no other thread changes this */
        return;
    lock_take(&relay_lock);
    uncount_locked(relay, slot);
    unpark_locked(relay);
    lock_release(&relay_lock);
}

/* --- requests enter the lot ----------------------------------------------------------------------------------------- */

void park_locked(struct relay *relay, uint32_t slot)
{
    ASSERT(state_of(relay, slot) == SLOT_READING);
    struct lot *lot = &relay->lot;
    const struct fuse_in_header *header = slot_data(relay, slot);
    uint32_t length = head_of(relay, slot)->length;
    if (length <= PARKED_BYTES && lot->free_count && !shares_full(&lot->shares, header->uid)) {
        uint32_t place = lot->free[--lot->free_count];
        memcpy(relay->shared->parked[place].message, header, length);
        relay->shared->parked[place].length = length; /* from here on the request is there twice, until the slot is emptied */
        link_last_locked(relay, place);
    } else if (!request_is(header->opcode, FORGETS)) { /* a FORGET has no answer */
        set_state_locked(relay, slot, SLOT_IN_DOUBT); /* as in fail_locked */
        reply(relay->device, head_of(relay, slot)->unique, EAGAIN, NULL, 0);
        set_state_locked(relay, slot, SLOT_FREE);
    }
    relay_ready_slot(relay, slot);
    set_state_locked(relay, slot, SLOT_READING);
    if (uncount_locked(relay, slot))
        unpark_locked(relay);
}

static bool is_in_slot(const struct relay *relay, uint64_t unique)
{
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++)
        if (head_of(relay, slot)->unique == unique && state_of(relay, slot) != SLOT_FREE)
            return true;
    return false;
}

bool lot_init_locked(struct relay *relay)
{
    struct lot *lot = &relay->lot;
    if (!shares_init(&lot->shares, PARKED_COUNT - RESERVED_PARKED, RESERVED_PARKED, PARKED_COUNT))
        return false;
    for (uint32_t place = PARKED_COUNT; place-- > 0;) {
        struct parked *parked = &relay->shared->parked[place];
        const struct fuse_in_header *header = parked_header(relay, place);
        bool good = parked->length >= sizeof *header && parked->length <= PARKED_BYTES && header->len == parked->length;
        if (good && !is_in_slot(relay, header->unique)) {
            link_last_locked(relay, place);
        } else {
            parked->length = 0;
            lot->free[lot->free_count++] = place;
        }
    }
    unpark_locked(relay);
    return true;
}

/* --- callers that stop waiting ------------------------------------------------------------------------------------- */

static uint32_t find_parked_locked(const struct relay *relay, uint64_t unique) REQUIRES(relay_lock)
{
    uint32_t place = relay->lot.first;
    while (place != NO_SLOT && parked_header(relay, place)->unique != unique)
        place = relay->lot.next[place];
    return place;
}

uint32_t relay_caller(struct relay *relay, uint64_t unique)
{
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        const struct slot_head *head = head_of(relay, slot);
        if (head->unique != unique || state_of(relay, slot) == SLOT_FREE)
            continue;
        uint32_t caller = head->caller;
        if (head->unique == unique) /* else the slot belongs to another request by now */
            return caller;
    }
    lock_take(&relay_lock);
    uint32_t place = find_parked_locked(relay, unique);
    uint32_t pid = place == NO_SLOT ? 0 : parked_header(relay, place)->pid;
    lock_release(&relay_lock);
    return pid;
}

bool interrupt_parked_locked(struct relay *relay, uint64_t unique)
{
    uint32_t place = find_parked_locked(relay, unique);
    if (place == NO_SLOT || !request_is(parked_header(relay, place)->opcode, INTERRUPTIBLE))
        return false;
    reply(relay->device, unique, EINTR, NULL, 0);
    leave_locked(relay, place);
    return true;
}

uint32_t relay_interruptible(const struct relay *relay, uint64_t *uniques, uint32_t room)
{
    uint32_t count = 0;
    lock_take(&relay_lock);
    for (uint32_t slot = 0; slot < SLOT_COUNT && count < room; slot++) {
        const struct fuse_in_header *header = slot_data(relay, slot);
        if (state_of(relay, slot) != SLOT_FREE && request_is(header->opcode, INTERRUPTIBLE))
            uniques[count++] = head_of(relay, slot)->unique;
    }
    for (uint32_t place = relay->lot.first; place != NO_SLOT && count < room; place = relay->lot.next[place])
        if (request_is(parked_header(relay, place)->opcode, INTERRUPTIBLE))
            uniques[count++] = parked_header(relay, place)->unique;
    lock_release(&relay_lock);
    return count;
}
