#include "relay/relay.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/assertion.h"
#include "common/clock.h"
#include "kernel/reply.h"
#include "relay/lot.h"
#include "relay/passing.h"
#include "relay/slots.h"
#include "relay/split.h"

#define MESSAGE_BYTES (160u << 10)
#define INIT_SLOT 0xffffu
#define PYTHON_MINOR 13 /* with it libfuse neither splices nor expects anything newer from us (hazards 5, 6) */

static void send_init_locked(struct relay *relay) REQUIRES(relay_lock)
{
    struct shared *shared = relay->shared;
    if (relay->python < 0 || !shared->init_length || shared->init_passed)
        return;
    struct {
        struct fuse_in_header header;
        uint8_t body[INIT_BYTES];
    } message = {.header = {.opcode = FUSE_INIT, .unique = INIT_SLOT}};
    /* Without FUSE_INIT_EXT the body is the kernel's first struct: major, minor, max_readahead, flags. */
    struct fuse_init_in *init = (struct fuse_init_in *)message.body;
    memcpy(message.body, shared->init, sizeof message.body);
    init->minor = PYTHON_MINOR;
    init->flags &= ~(uint32_t)FUSE_INIT_EXT;
    message.header.len = sizeof message.header + 16;
    if (send_message(relay->python, &message, message.header.len))
        shared->init_passed = 1;
    else
        fprintf(stderr, "fast path: cannot pass INIT on: %s\n", strerror(errno));
}

void relay_pass_init(struct relay *relay)
{
    lock_take(&relay_lock);
    send_init_locked(relay);
    lock_release(&relay_lock);
}

bool relay_interrupt(struct relay *relay, uint64_t unique)
{
    bool found = false;
    lock_take(&relay_lock);
    for (uint32_t slot = 0; slot < SLOT_COUNT && !found; slot++) {
        enum slot_state state = state_of(relay, slot);
        struct fuse_in_header *header = slot_data(relay, slot);
        if ((state != SLOT_PASSED && state != SLOT_QUEUED) || head_of(relay, slot)->unique != unique ||
            !request_is(header->opcode, INTERRUPTIBLE))
            continue;
        found = true;
        if (state == SLOT_QUEUED) {
            fail_locked(relay, slot, EINTR);
        } else {
            reply(relay->device, unique, EINTR, NULL, 0);
            set_state_locked(relay, slot, SLOT_ANSWERED);
        }
    }
    found = found || interrupt_parked_locked(relay, unique);
    lock_release(&relay_lock);
    return found;
}

/* --- answers ------------------------------------------------------------------------------------------------------ */

static void deliver(struct relay *relay, struct fuse_out_header *answer, size_t length)
{
    if (length < sizeof *answer || answer->len != length || !answer->unique)
        return;
    uint32_t slot = answer->unique & 0xffff, part = answer->unique >> 16 & 0xff;
    if (slot >= SLOT_COUNT)
        return; /* the answer to INIT. Notifications do not come this way: a separate process writes them to /dev/fuse (hazard 1) */
    lock_take(&relay_lock);
    enum slot_state state = state_of(relay, slot);
    bool split = relay->splits[slot]; /* its first parts may be answered before the last ones are sent */
    bool known = unique_of(relay, slot, part) == answer->unique &&
                 (state == SLOT_PASSED || state == SLOT_ANSWERED || state == SLOT_ANSWERING || (split && state == SLOT_QUEUED));
    if (known && split) {
        if (split_answer_locked(relay, slot, part, answer))
            free_locked(relay, slot);
    } else if (known) {
        answer->unique = head_of(relay, slot)->unique;
        if (state != SLOT_ANSWERED) {
            /* First: else a successor would repeat a WRITE after the next operation of its caller. */
            set_state_locked(relay, slot, SLOT_ANSWERING);
            reply_message(relay->device, answer, length);
        }
        free_locked(relay, slot);
    }
    lock_release(&relay_lock);
}

/* Python is gone, and all its answers were delivered. The requests that it has not answered are passed on again, if that does
 * no harm. */
static void repeat_unanswered_locked(struct relay *relay) REQUIRES(relay_lock)
{
    static uint8_t unread[SLOT_COUNT];
    static uint8_t message[MESSAGE_BYTES];
    memset(unread, 0, sizeof unread);
    ssize_t length;
    while (relay->python_end >= 0 &&
           (length = recv(relay->python_end, message, sizeof message, MSG_DONTWAIT)) >= (ssize_t)sizeof(struct fuse_in_header)) {
        uint64_t unique = ((struct fuse_in_header *)message)->unique;
        uint32_t slot = unique & 0xffff;
        if (slot < SLOT_COUNT && unique_of(relay, slot, unique >> 16 & 0xff) == unique)
            unread[slot] = 1; /* Python never saw this one */
    }
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        enum slot_state state = state_of(relay, slot);
        if (state == SLOT_ANSWERED)
            free_locked(relay, slot);
        else if (state == SLOT_PASSED || state == SLOT_PASSING || state == SLOT_ANSWERING)
            repeat_locked(relay, slot, unread[slot]);
        else if (state == SLOT_QUEUED && relay->splits[slot]) /* the next Python gets all parts, not the rest */
            repeat_locked(relay, slot, true);
    }
}

static void close_python_locked(struct relay *relay) REQUIRES(relay_lock)
{
    if (relay->python >= 0)
        close(relay->python);
    if (relay->python_end >= 0)
        close(relay->python_end);
    relay->python = relay->python_end = -1;
    relay->going = false;
    relay->absent_since_ns = monotonic_ns();
    pthread_cond_broadcast(&relay->changed);
}

/* The receiver's thread: it delivers Python's answers to the kernel. */
static void *run_receiver(void *context)
{
    struct relay *relay = context;
    static uint8_t message[MESSAGE_BYTES];
    lock_take(&relay_lock);
    for (;;) {
        int python = relay->python;
        if (python < 0) {
            lock_wait(&relay_lock, &relay->changed);
            continue;
        }
        lock_release(&relay_lock);
        /* An answer is peeked, delivered, and only then taken: if this process is killed in between, the successor delivers
         * it again, and the kernel, which has its answer, returns ENOENT. */
        ssize_t length = recv(python, message, MESSAGE_BYTES, MSG_PEEK);
        if (length > 0) {
            deliver(relay, (struct fuse_out_header *)message, (size_t)length);
            recv(python, message, 1, MSG_TRUNC);
        }
        lock_take(&relay_lock);
        if (length == 0 || (length < 0 && errno != EINTR)) {
            repeat_unanswered_locked(relay);
            close_python_locked(relay);
        }
    }
    return NULL;
}

/* --- Python comes and goes ---------------------------------------------------------------------------------------- */

bool relay_init(struct relay *relay, struct shared *shared, int device)
{
    *relay = (struct relay){
        .shared = shared,
        .data = (uint8_t *)shared + SHARED_HEAD_BYTES,
        .device = device,
        .python = -1,
        .python_end = -1,
        .changed = PTHREAD_COND_INITIALIZER,
        .absent_since_ns = monotonic_ns(),
        .work_ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
        .lot = {.first = NO_SLOT, .last = NO_SLOT},
    };
    const uint32_t total = SLOT_COUNT - SLOTS_FOR_THREADS - RESERVED_SLOTS;
    if (relay->work_ready < 0 || !shares_init(&relay->slot_shares, total, RESERVED_SLOTS, SLOT_COUNT) ||
        !shares_init(&relay->passed_shares, MAX_PASSED, RESERVED_PASSED, SLOT_COUNT))
        return false;
    lock_take(&relay_lock);
    for (uint32_t slot = SLOT_COUNT; slot-- > 0;) {
        struct fuse_in_header *message = slot_data(relay, slot);
        struct slot_head *head = head_of(relay, slot);
        if (state_of(relay, slot) != SLOT_FREE)
            (state_of(relay, slot) == SLOT_READING ? count_locked : count_passed_locked)(relay, slot);
        switch (state_of(relay, slot)) {
        case SLOT_FREE:
            free_locked(relay, slot);
            break;
        case SLOT_READING:
            if (!message->unique || message->len < sizeof *message || message->len > SLOT_BYTES)
                free_locked(relay, slot);
            else {
                /* Before the attempt counts: this process may be killed, too. */
                relay_fill_slot(relay, slot, message->len, message->unique);
                if (head->attempts++ == 0) {
                    add_work_locked(relay, slot);
                } else { /* the last processes may have died of it: it is passed on */
                    count_passed_locked(relay, slot);
                    enqueue_locked(relay, slot);
                }
            }
            break;
        case SLOT_PASSING: /* Python may have it or not */
            repeat_locked(relay, slot, false);
            break;
        case SLOT_PASSED:
        case SLOT_ANSWERING: /* the answer will come over the socket, unless its Python is gone */
            if (head->parts) /* a READ: the parts that had arrived are lost with the predecessor */
                repeat_locked(relay, slot, false);
            break;
        case SLOT_QUEUED:
            if (head->parts) /* some parts may have been sent: their answers do not belong to the parts that we send */
                repeat_locked(relay, slot, true);
            else
                enqueue_locked(relay, slot);
            break;
        case SLOT_IN_DOUBT: /* its answer may be lost with the predecessor */
            reply(relay->device, head->unique, EIO, NULL, 0);
            break;
        case SLOT_ANSWERED:
            break;
        }
    }
    bool parked = lot_init_locked(relay);
    lock_release(&relay_lock);
    return parked;
}

int relay_start(struct relay *relay)
{
    int error = pthread_create(&relay->receiver, NULL, run_receiver, relay);
    return error ? error : pthread_create(&relay->sender, NULL, relay_run_sender, relay);
}

void relay_attach(struct relay *relay, int python, int python_end, bool same)
{
    lock_take(&relay_lock);
    if (same && relay->python >= 0 && !relay->going) { /* it had asked our predecessor as well: the same socket */
        lock_release(&relay_lock);
        close(python);
        close(python_end);
        return;
    }
    while (relay->python >= 0) { /* the receiver still delivers answers of the last one */
        shutdown(relay->python, SHUT_RDWR);
        lock_wait(&relay_lock, &relay->changed);
    }
    if (!same) {
        relay->shared->init_passed = 0;
        repeat_unanswered_locked(relay);
    }
    ASSERT(relay->python < 0 && !relay->going);
    relay->python = python;
    relay->python_end = python_end;
    relay->given_up = false;
    send_init_locked(relay);
    pthread_cond_broadcast(&relay->changed);
    lock_release(&relay_lock);
}

uint32_t relay_next_doubt(struct relay *relay)
{
    lock_take(&relay_lock);
    uint32_t slot = 0;
    while (slot < SLOT_COUNT && state_of(relay, slot) != SLOT_IN_DOUBT)
        slot++;
    lock_release(&relay_lock);
    return slot < SLOT_COUNT ? slot : NO_SLOT;
}

void relay_hang_up(struct relay *relay)
{
    lock_take(&relay_lock);
    if (relay->python >= 0) {
        relay->going = true;
        shutdown(relay->python, SHUT_RDWR); /* the receiver reads what has arrived, and then the end */
    }
    lock_release(&relay_lock);
}

void relay_quiesce(struct relay *relay)
{
    lock_take(&relay_lock);
    while (relay->going)
        lock_wait(&relay_lock, &relay->changed);
}

/* The requests of a Python whose answers will never come. */
static void fail_passed_locked(struct relay *relay) REQUIRES(relay_lock)
{
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        struct request request;
        enum slot_state state = state_of(relay, slot);
        if (state != SLOT_PASSED && state != SLOT_ANSWERING)
            continue;
        if (state == SLOT_ANSWERING || (parse_slot(relay, slot, &request) && request_changes(&request)))
            doubt_locked(relay, slot);
        else
            fail_locked(relay, slot, EIO);
    }
}

void relay_tick(struct relay *relay)
{
    lock_take(&relay_lock);
    if (relay->python < 0 && !relay->given_up &&
        monotonic_ns() - relay->absent_since_ns > relay->shared->reconnect_timeout_ns) {
        relay->given_up = true;
        fail_queued_locked(relay);
        fail_passed_locked(relay);
    }
    lock_release(&relay_lock);
}
