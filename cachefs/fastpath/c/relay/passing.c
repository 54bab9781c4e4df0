#include "relay/passing.h"

#include <errno.h>
#include <poll.h>

#include "common/assertion.h"
#include "kernel/reply.h"
#include "relay/lot.h"
#include "relay/slots.h"
#include "relay/split.h"

static bool must_split(const struct request *request)
{
    return request->header->opcode == FUSE_READ && ((const struct fuse_read_in *)request->body)->size > PART_BYTES;
}

void doubt_locked(struct relay *relay, uint32_t slot)
{
    reply(relay->device, head_of(relay, slot)->unique, EIO, NULL, 0);
    set_state_locked(relay, slot, SLOT_IN_DOUBT);
}

/* libfuse does not pass to pyfuse3 which times are to be "now" (bit 0: atime, 1: mtime). The ctime of a SETATTR is free: the
 * kernel sets it only with a writeback cache, which we never ask for. Calling this twice changes nothing. */
static void mark_now(const struct request *request)
{
    struct fuse_setattr_in *wanted = request->body;
    wanted->ctime = (wanted->valid & FATTR_ATIME_NOW ? 1 : 0) | (wanted->valid & FATTR_MTIME_NOW ? 2 : 0);
    wanted->ctimensec = 0;
    wanted->valid |= FATTR_CTIME;
}

/* Of these requests pyfuse3 passes on the handle, and neither inode nor caller. Python needs both where the handle is one of
 * ours, or where OPEN is never sent and there is no handle. So the handle is replaced by the place of the request, which is
 * its slot and generation: Python reads inode and caller from the request's header (shared_memory.py). A request that was
 * passed on is never served here again. */
static void name_place(const struct relay *relay, uint32_t slot, const struct request *request)
{
    uint32_t opcode = request->header->opcode;
    uint64_t *handle = request->body; /* the first field of all of them */
    if (opcode != FUSE_READ && opcode != FUSE_READDIR && opcode != FUSE_READDIRPLUS && opcode != FUSE_FSYNCDIR)
        return;
    if (*handle & FAST_HANDLE || relay->shared->flags & NO_OPEN)
        *handle = FAST_HANDLE | head_of(relay, slot)->word >> 8 << 16 | slot;
}

/* False: not now. errno EAGAIN: Python's queue is full; else Python is gone. */
static bool send_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock)
{
    struct request request;
    ASSERT(relay->python >= 0 && (state_of(relay, slot) == SLOT_QUEUED || state_of(relay, slot) == SLOT_READING));
    if (!parse_slot(relay, slot, &request) || (must_split(&request) && !split_begin_locked(relay, slot, &request))) {
        fail_locked(relay, slot, EIO);
        return true;
    }
    uint32_t opcode = request.header->opcode;
    name_place(relay, slot, &request);
    if (opcode == FUSE_SETATTR)
        mark_now(&request);
    set_state_locked(relay, slot, SLOT_PASSING);
    bool sent;
    if (relay->splits[slot]) {
        sent = split_send_locked(relay, slot, &request);
    } else {
        request.header->unique = unique_of(relay, slot, 0);
        sent = send_message(relay->python, request.header, request.header->len);
        int error = errno;
        request.header->unique = head_of(relay, slot)->unique;
        errno = error;
    }
    if (!sent) {
        set_state_locked(relay, slot, SLOT_QUEUED);
        return false;
    }
    if (request_is(opcode, FORGETS))
        free_locked(relay, slot);
    else
        set_state_locked(relay, slot, SLOT_PASSED);
    return true;
}

static bool is_current_locked(const struct relay *relay, uint32_t at) REQUIRES(relay_lock)
{
    return head_of(relay, relay->queue[at].slot)->word == relay->queue[at].word;
}

/* Drops entries of requests that were answered while they waited (EINTR). Each slot has at most one that is current. */
static void compact_locked(struct relay *relay) REQUIRES(relay_lock)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < relay->queue_count; i++) {
        uint32_t at = (relay->queue_head + i) % SLOT_COUNT;
        if (is_current_locked(relay, at))
            relay->queue[(relay->queue_head + kept++) % SLOT_COUNT] = relay->queue[at];
    }
    relay->queue_count = kept;
}

void enqueue_locked(struct relay *relay, uint32_t slot)
{
    if (relay->queue_count == SLOT_COUNT)
        compact_locked(relay);
    ASSERT(relay->queue_count < SLOT_COUNT);
    set_state_locked(relay, slot, SLOT_QUEUED);
    uint32_t at = (relay->queue_head + relay->queue_count++) % SLOT_COUNT;
    relay->queue[at].slot = slot;
    relay->queue[at].word = head_of(relay, slot)->word;
    pthread_cond_broadcast(&relay->changed);
}

void repeat_locked(struct relay *relay, uint32_t slot, bool unseen)
{
    struct request request;
    if (!parse_slot(relay, slot, &request)) {
        fail_locked(relay, slot, EIO);
    } else if ((!unseen && request_changes(&request)) ||
               /* its caller may have overwritten the result since */
               (state_of(relay, slot) == SLOT_ANSWERING && request_is(request.header->opcode, OVERWRITES))) {
        doubt_locked(relay, slot);
    } else if (!unseen && request_is(request.header->opcode, FORGETS)) {
        free_locked(relay, slot); /* counting one look-up too many is better than one too few */
    } else {
        request.header->unique = head_of(relay, slot)->unique; /* a killed predecessor may have left our unique in it */
        split_drop_locked(relay, slot);
        renew_locked(relay, slot, SLOT_QUEUED);
        enqueue_locked(relay, slot);
    }
}

static void hand_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock)
{
    count_passed_locked(relay, slot);
    if (relay->python < 0 || relay->queue_count || !send_locked(relay, slot))
        enqueue_locked(relay, slot);
}

/* Does Python have enough requests of this owner? This applies to requests whose slot is claimed, too, such as a READ whose
 * fetch failed: a request waits at Python for as long as the source makes it wait. Requests too long for the lot are passed
 * on nevertheless, up to the share of slots. */
static bool has_enough_locked(const struct relay *relay, uint32_t slot) REQUIRES(relay_lock)
{
    return !relay->counted_passed[slot] && head_of(relay, slot)->length <= PARKED_BYTES &&
           shares_full(&relay->passed_shares, owner_of(relay, slot));
}

bool relay_claim_passed(struct relay *relay, uint32_t slot)
{
    lock_take(&relay_lock);
    bool claimed = !has_enough_locked(relay, slot) && claim_locked(relay, slot);
    if (claimed)
        count_passed_locked(relay, slot);
    lock_release(&relay_lock);
    return claimed;
}

bool relay_pass(struct relay *relay, uint32_t slot)
{
    bool given = true;
    lock_take(&relay_lock);
    ASSERT(state_of(relay, slot) == SLOT_READING);
    uint32_t opcode = ((struct fuse_in_header *)slot_data(relay, slot))->opcode;
    if (relay->python < 0 && request_is(opcode, FORGETS))
        free_locked(relay, slot); /* it leaves a useless record in the session; a slot would cost more */
    else if (relay->given_up)
        fail_locked(relay, slot, EIO);
    else if (!(given = !has_enough_locked(relay, slot) && claim_locked(relay, slot)))
        park_locked(relay, slot);
    else
        hand_locked(relay, slot);
    if (given)
        relay->shared->passed[opcode < OPERATIONS ? opcode : OPERATIONS - 1]++;
    lock_release(&relay_lock);
    return given;
}

void *relay_run_sender(void *context)
{
    struct relay *relay = context;
    lock_take(&relay_lock);
    for (;;) {
        if (relay->python < 0 || relay->going || !relay->queue_count) {
            lock_wait(&relay_lock, &relay->changed);
            continue;
        }
        if (!is_current_locked(relay, relay->queue_head) || send_locked(relay, relay->queue[relay->queue_head].slot)) {
            relay->queue_head = (relay->queue_head + 1) % SLOT_COUNT;
            relay->queue_count--;
            continue;
        }
        struct pollfd wait = {relay->python, POLLOUT, 0};
        lock_release(&relay_lock);
        poll(&wait, 1, 100);
        lock_take(&relay_lock);
    }
    return NULL;
}

void fail_queued_locked(struct relay *relay)
{
    while (relay->queue_count) {
        if (is_current_locked(relay, relay->queue_head))
            fail_locked(relay, relay->queue[relay->queue_head].slot, EIO);
        relay->queue_head = (relay->queue_head + 1) % SLOT_COUNT;
        relay->queue_count--;
    }
}
