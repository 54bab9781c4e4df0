#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "index.h"
#include "relay_parts.h"

#define MESSAGE_BYTES (160u << 10)
#define INIT_SLOT 0xffffu
#define PYTHON_MINOR 13 /* so that libfuse neither splices nor expects anything newer of us (hazards 5, 6) */

/* --- passing on -------------------------------------------------------------------------------------------------- */

bool send_message(int python, const void *message, size_t length)
{
    return send(python, message, length, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)length;
}

static bool must_split(const struct request *request)
{
    return request->header->opcode == FUSE_READ && ((const struct fuse_read_in *)request->body)->size > PART_BYTES;
}

static void doubt_locked(struct relay *relay, uint32_t slot)
{
    reply(relay->device, head_of(relay, slot)->unique, EIO, NULL, 0);
    set_state(relay, slot, SLOT_IN_DOUBT);
}

/* libfuse does not hand pyfuse3 which times are to be "now" (bit 0: atime, 1: mtime). The ctime of a SETATTR is free: the
   kernel fills it in only with a writeback cache, which is never asked for. Doing this twice is doing it once. */
static void mark_now(const struct request *request)
{
    struct fuse_setattr_in *wanted = request->body;
    wanted->ctime = (wanted->valid & FATTR_ATIME_NOW ? 1 : 0) | (wanted->valid & FATTR_MTIME_NOW ? 2 : 0);
    wanted->ctimensec = 0;
    wanted->valid |= FATTR_CTIME;
}

/* Of these requests pyfuse3 hands on the handle, and neither inode nor caller. With a handle of ours, or with none where OPEN
 * is never sent, Python needs both. So the handle is replaced by the place of the request, which is slot and generation:
 * Python reads them from its header (shared.py). A request that was passed on is never served here again. */
static void name_place(const struct relay *relay, uint32_t slot, const struct request *request)
{
    uint32_t opcode = request->header->opcode;
    uint64_t *handle = request->body; /* the first field of all of them */
    if (opcode != FUSE_READ && opcode != FUSE_READDIR && opcode != FUSE_READDIRPLUS && opcode != FUSE_FSYNCDIR)
        return;
    if (*handle & FAST_HANDLE || relay->shared->flags & NO_OPEN)
        *handle = FAST_HANDLE | head_of(relay, slot)->word >> 8 << 16 | slot;
}

/* False: not now. errno EAGAIN: its queue is full; else it is gone. */
static bool send_locked(struct relay *relay, uint32_t slot)
{
    struct request request;
    if (!parse_slot(relay, slot, &request)) {
        fail_locked(relay, slot, EIO);
        return true;
    }
    uint32_t opcode = request.header->opcode;
    name_place(relay, slot, &request);
    if (must_split(&request) && !split_begin(relay, slot, &request)) {
        fail_locked(relay, slot, EIO);
        return true;
    }
    if (opcode == FUSE_SETATTR)
        mark_now(&request);
    set_state(relay, slot, SLOT_PASSING);
    bool sent;
    if (relay->splits[slot]) {
        sent = split_send(relay, slot, &request);
    } else {
        request.header->unique = unique_of(relay, slot, 0);
        sent = send_message(relay->python, request.header, request.header->len);
        int error = errno;
        request.header->unique = head_of(relay, slot)->unique;
        errno = error;
    }
    if (!sent) {
        set_state(relay, slot, SLOT_QUEUED);
        return false;
    }
    if (request_forgets(opcode))
        free_locked(relay, slot);
    else
        set_state(relay, slot, SLOT_PASSED);
    return true;
}

static bool is_current(const struct relay *relay, uint32_t at)
{
    return head_of(relay, relay->queue[at].slot)->word == relay->queue[at].word;
}

/* Forgets entries of requests that were answered while they waited (EINTR). Each slot has one that is current at most. */
static void compact_locked(struct relay *relay)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < relay->queue_count; i++) {
        uint32_t at = (relay->queue_head + i) % SLOT_COUNT;
        if (is_current(relay, at))
            relay->queue[(relay->queue_head + kept++) % SLOT_COUNT] = relay->queue[at];
    }
    relay->queue_count = kept;
}

static void enqueue_locked(struct relay *relay, uint32_t slot)
{
    if (relay->queue_count == SLOT_COUNT)
        compact_locked(relay);
    set_state(relay, slot, SLOT_QUEUED);
    uint32_t at = (relay->queue_head + relay->queue_count++) % SLOT_COUNT;
    relay->queue[at].slot = slot;
    relay->queue[at].word = head_of(relay, slot)->word;
    pthread_cond_broadcast(&relay->changed);
}

/* What was passed on, or was just being, and has no answer: again, if that can do no harm. `unseen`: surely not done. */
static void repeat_locked(struct relay *relay, uint32_t slot, bool unseen)
{
    struct request request;
    if (!parse_slot(relay, slot, &request)) {
        fail_locked(relay, slot, EIO);
    } else if (!unseen && request_changes(&request)) {
        doubt_locked(relay, slot);
    } else if (!unseen && request_forgets(request.header->opcode)) {
        free_locked(relay, slot); /* better a look-up too many is counted than one too few */
    } else if (state_of(relay, slot) == SLOT_ANSWERING && request_overwrites(request.header->opcode)) {
        doubt_locked(relay, slot); /* its caller may have overwritten it since */
    } else {
        request.header->unique = head_of(relay, slot)->unique; /* a kill may have left ours in it */
        split_drop(relay, slot);
        renew(relay, slot, SLOT_QUEUED);
        enqueue_locked(relay, slot);
    }
}

static void hand_locked(struct relay *relay, uint32_t slot)
{
    count_passed_locked(relay, slot);
    if (relay->python < 0 || relay->queue_count || !send_locked(relay, slot))
        enqueue_locked(relay, slot);
}

/* Has Python enough of this owner? Also of a request whose slot is claimed, such as a READ that the source refused us: what
 * waits at Python waits there for as long as the source lets it. Requests too long for the lot are passed on all the
 * same, up to the share of slots. */
static bool has_enough(const struct relay *relay, uint32_t slot)
{
    const struct fuse_in_header *header = slot_data(relay, slot);
    return !relay->counted_passed[slot] && head_of(relay, slot)->length <= PARKED_BYTES &&
           shares_full(&relay->passed_shares, header->uid);
}

bool relay_claim_passed(struct relay *relay, uint32_t slot)
{
    pthread_mutex_lock(&relay->lock);
    bool claimed = !has_enough(relay, slot) && claim_locked(relay, slot);
    if (claimed)
        count_passed_locked(relay, slot);
    pthread_mutex_unlock(&relay->lock);
    return claimed;
}

bool relay_pass(struct relay *relay, uint32_t slot)
{
    bool given = true;
    pthread_mutex_lock(&relay->lock);
    uint32_t opcode = ((struct fuse_in_header *)slot_data(relay, slot))->opcode;
    if (relay->python < 0 && request_forgets(opcode))
        free_locked(relay, slot); /* a record too many in the session; a slot would cost more */
    else if (relay->given_up)
        fail_locked(relay, slot, EIO);
    else if (!(given = !has_enough(relay, slot) && claim_locked(relay, slot)))
        park_locked(relay, slot);
    else
        hand_locked(relay, slot);
    if (given)
        relay->shared->passed[opcode < OPERATIONS ? opcode : OPERATIONS - 1]++;
    pthread_mutex_unlock(&relay->lock);
    return given;
}

/* A thread of its own: what could not be sent at once. */
static void *run_sender(void *context)
{
    struct relay *relay = context;
    pthread_mutex_lock(&relay->lock);
    for (;;) {
        if (relay->python < 0 || relay->going || !relay->queue_count) {
            pthread_cond_wait(&relay->changed, &relay->lock);
            continue;
        }
        if (!is_current(relay, relay->queue_head) || send_locked(relay, relay->queue[relay->queue_head].slot)) {
            relay->queue_head = (relay->queue_head + 1) % SLOT_COUNT;
            relay->queue_count--;
            continue;
        }
        struct pollfd wait = {relay->python, POLLOUT, 0};
        pthread_mutex_unlock(&relay->lock);
        poll(&wait, 1, 100);
        pthread_mutex_lock(&relay->lock);
    }
    return NULL;
}

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
        split_answer(relay, slot, part, answer);
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
    return error ? error : pthread_create(&relay->sender, NULL, run_sender, relay);
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
        while (relay->queue_count) {
            if (is_current(relay, relay->queue_head))
                fail_locked(relay, relay->queue[relay->queue_head].slot, EIO);
            relay->queue_head = (relay->queue_head + 1) % SLOT_COUNT;
            relay->queue_count--;
        }
        fail_passed_locked(relay);
    }
    pthread_mutex_unlock(&relay->lock);
}
