#include "relay/relay.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "kernel/reply.h"
#include "relay/lot.h"
#include "relay/passing.h"
#include "relay/slots.h"
#include "relay/split.h"

#define MESSAGE_BYTES (160u << 10)
#define INIT_SLOT 0xffffu
#define PYTHON_MINOR 13 /* so that libfuse neither splices nor expects anything newer of us (hazards 5, 6) */

static void send_init_locked(struct relay *relay)
{
    struct shared *shared = relay->shared;
    if (relay->python < 0 || !shared->init_length || shared->init_passed)
        return;
    struct {
        struct fuse_in_header header;
        uint8_t body[INIT_BYTES];
    } message = {.header = {.opcode = FUSE_INIT, .unique = INIT_SLOT}};
    /* Without FUSE_INIT_EXT the kernel's first struct: major, minor, max_readahead, flags. */
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
    pthread_mutex_lock(&relay->lock);
    send_init_locked(relay);
    pthread_mutex_unlock(&relay->lock);
}

bool relay_interrupt(struct relay *relay, uint64_t unique)
{
    bool found = false;
    pthread_mutex_lock(&relay->lock);
    for (uint32_t slot = 0; slot < SLOT_COUNT && !found; slot++) {
        enum slot_state state = state_of(relay, slot);
        struct fuse_in_header *header = slot_data(relay, slot);
        if ((state != SLOT_PASSED && state != SLOT_QUEUED) || head_of(relay, slot)->unique != unique ||
            !request_interruptible(header->opcode))
            continue;
        found = true;
        if (state == SLOT_QUEUED) {
            fail_locked(relay, slot, EINTR);
        } else {
            reply(relay->device, unique, EINTR, NULL, 0);
            set_state(relay, slot, SLOT_ANSWERED);
        }
    }
    found = found || interrupt_parked_locked(relay, unique);
    pthread_mutex_unlock(&relay->lock);
    return found;
}

/* --- answers ------------------------------------------------------------------------------------------------------ */

static void deliver(struct relay *relay, struct fuse_out_header *answer, size_t length)
{
    if (length < sizeof *answer || answer->len != length || !answer->unique)
        return;
    uint32_t slot = answer->unique & 0xffff, part = answer->unique >> 16 & 0xff;
    if (slot >= SLOT_COUNT)
        return; /* of INIT. Notifications do not come this way: a process of its own writes them to /dev/fuse (hazard 1) */
    pthread_mutex_lock(&relay->lock);
    enum slot_state state = state_of(relay, slot);
    bool split = relay->splits[slot]; /* its first parts may be answered while the others are still to be sent */
    bool known = unique_of(relay, slot, part) == answer->unique &&
                 (state == SLOT_PASSED || state == SLOT_ANSWERED || state == SLOT_ANSWERING || (split && state == SLOT_QUEUED));
    if (known && split) {
        if (split_answer(relay, slot, part, answer))
            free_locked(relay, slot);
    } else if (known) {
        answer->unique = head_of(relay, slot)->unique;
        if (state != SLOT_ANSWERED) {
            set_state(relay, slot, SLOT_ANSWERING); /* first: a WRITE would be made again, after what its caller does next */
            reply_message(relay->device, answer, length);
        }
        free_locked(relay, slot);
    }
    pthread_mutex_unlock(&relay->lock);
}

/* Python is gone and all its answers are out. What it had and nobody answered: again, if that can do no harm. */
static void settle_locked(struct relay *relay)
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
            unread[slot] = 1; /* it never saw this one */
    }
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        enum slot_state state = state_of(relay, slot);
        if (state == SLOT_ANSWERED)
            free_locked(relay, slot);
        else if (state == SLOT_PASSED || state == SLOT_PASSING || state == SLOT_ANSWERING)
            repeat_locked(relay, slot, unread[slot]);
        else if (state == SLOT_QUEUED && relay->splits[slot]) /* the next one gets all parts, not the rest */
            repeat_locked(relay, slot, true);
    }
}

static void close_python_locked(struct relay *relay)
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

/* A thread of its own: Python's answers on their way to the kernel. */
static void *run_receiver(void *context)
{
    struct relay *relay = context;
    static uint8_t message[MESSAGE_BYTES];
    pthread_mutex_lock(&relay->lock);
    for (;;) {
        int python = relay->python;
        if (python < 0) {
            pthread_cond_wait(&relay->changed, &relay->lock);
            continue;
        }
        pthread_mutex_unlock(&relay->lock);
        /* Looked at, delivered, and only then taken: if we are killed in between the successor delivers it again, and
         * the kernel, which has been answered, says ENOENT. */
        ssize_t length = recv(python, message, MESSAGE_BYTES, MSG_PEEK);
        if (length > 0) {
            deliver(relay, (struct fuse_out_header *)message, (size_t)length);
            recv(python, message, 1, MSG_TRUNC);
        }
        pthread_mutex_lock(&relay->lock);
        if (length == 0 || (length < 0 && errno != EINTR)) {
            settle_locked(relay);
            close_python_locked(relay);
        }
    }
    return NULL;
}

/* --- coming and going --------------------------------------------------------------------------------------------- */

bool relay_init(struct relay *relay, struct shared *shared, int device)
{
    *relay = (struct relay){
        .shared = shared,
        .data = (uint8_t *)shared + SHARED_HEAD_BYTES,
        .device = device,
        .python = -1,
        .python_end = -1,
        .absent_since_ns = monotonic_ns(),
        .work_ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
        .lot = {.first = NO_SLOT, .last = NO_SLOT},
    };
    if (relay->work_ready < 0 || !shares_init(&relay->slot_shares, SLOT_COUNT - SLOTS_FOR_THREADS - RESERVED_SLOTS, RESERVED_SLOTS, SLOT_COUNT) ||
        !shares_init(&relay->passed_shares, MAX_PASSED, RESERVED_PASSED, SLOT_COUNT))
        return false;
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->changed, NULL);
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
                relay_fill_slot(relay, slot, message->len, message->unique); /* before the attempt counts: we may die, too */
                if (head->attempts++ == 0) {
                    add_work_locked(relay, slot);
                } else { /* it may be what the last ones died of: Python's */
                    count_passed_locked(relay, slot);
                    enqueue_locked(relay, slot);
                }
            }
            break;
        case SLOT_PASSING: /* did it arrive? Python may have it, or may not */
            repeat_locked(relay, slot, false);
            break;
        case SLOT_PASSED:
        case SLOT_ANSWERING: /* the answer is still in the socket, unless its Python is gone */
            if (head->parts) /* a READ, and the parts that had come died with the predecessor */
                repeat_locked(relay, slot, false);
            break;
        case SLOT_QUEUED:
            if (head->parts) /* some may have been sent: their answers are not for the parts that we send */
                repeat_locked(relay, slot, true);
            else
                enqueue_locked(relay, slot);
            break;
        case SLOT_IN_DOUBT: /* its answer may have died with the predecessor */
            reply(relay->device, head->unique, EIO, NULL, 0);
            break;
        case SLOT_ANSWERED:
            break;
        }
    }
    return lot_init(relay);
}

int relay_start(struct relay *relay)
{
    int error = pthread_create(&relay->receiver, NULL, run_receiver, relay);
    return error ? error : pthread_create(&relay->sender, NULL, relay_run_sender, relay);
}

void relay_attach(struct relay *relay, int python, int python_end, bool same)
{
    pthread_mutex_lock(&relay->lock);
    if (same && relay->python >= 0 && !relay->going) { /* it had asked our predecessor as well: the same socket */
        close(python);
        close(python_end);
        pthread_mutex_unlock(&relay->lock);
        return;
    }
    while (relay->python >= 0) { /* the receiver is still busy with the last one */
        shutdown(relay->python, SHUT_RDWR);
        pthread_cond_wait(&relay->changed, &relay->lock);
    }
    if (!same) {
        relay->shared->init_passed = 0;
        settle_locked(relay);
    }
    relay->python = python;
    relay->python_end = python_end;
    relay->given_up = false;
    send_init_locked(relay);
    pthread_cond_broadcast(&relay->changed);
    pthread_mutex_unlock(&relay->lock);
}

uint32_t relay_next_doubt(struct relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    uint32_t slot = 0;
    while (slot < SLOT_COUNT && state_of(relay, slot) != SLOT_IN_DOUBT)
        slot++;
    pthread_mutex_unlock(&relay->lock);
    return slot < SLOT_COUNT ? slot : NO_SLOT;
}

void relay_hang_up(struct relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    if (relay->python >= 0) {
        relay->going = true;
        shutdown(relay->python, SHUT_RDWR); /* what has arrived can still be read, and then the receiver sees the end */
    }
    pthread_mutex_unlock(&relay->lock);
}

void relay_quiesce(struct relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    while (relay->going)
        pthread_cond_wait(&relay->changed, &relay->lock);
}

/* What a Python has that never came back: its daemon died before it told us of it. */
static void fail_passed_locked(struct relay *relay)
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
    pthread_mutex_lock(&relay->lock);
    if (relay->python < 0 && !relay->given_up &&
        monotonic_ns() - relay->absent_since_ns > relay->shared->reconnect_timeout_ns) {
        relay->given_up = true;
        fail_queued_locked(relay);
        fail_passed_locked(relay);
    }
    pthread_mutex_unlock(&relay->lock);
}
