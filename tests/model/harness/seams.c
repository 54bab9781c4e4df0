/* Runs the real relay one operation at a time, and ends it before any of its writes.
 *
 * The relay is compiled with -fsanitize=thread, and with the functions below in place of that sanitizer: so each of its
 * writes to the shared memory comes here first. System calls come here by macros. A kill is a jump out of the operation
 * before a write or a call, and a new struct relay on the same memory. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernel/reply.h"
#include "misses/miss.h"
#include "relay/lot.h"
#include "relay/passing.h"
#include "relay/relay.h"
#include "relay/slots.h"
#include "serve/interrupt.h"

enum { DONE, BLOCKED, KILLED };
enum { SENT, UNREAD, DELIVERED, ANSWER, ARRIVED };

struct event {
    uint64_t what, unique;
    int64_t error;
};

static struct shared *shared;
static struct fastpath *fastpath;
static struct relay *relay; /* its */
static jmp_buf out;
static int64_t writes_left; /* until the kill; negative: none */
static uint32_t room, share, places, looks;
static struct event events[4096];
static uint32_t event_count;

void turn_receiver(struct relay *relay);
void forget_interrupts(void);
void interrupt_again(struct fastpath *fastpath, uint64_t unique);
uint32_t interrupts_noted(uint64_t *uniques);

static void note(uint64_t what, uint64_t unique, int64_t error)
{
    if (event_count < sizeof events / sizeof *events)
        events[event_count++] = (struct event){what, unique, error};
}

/* --- a write, which a kill may prevent ---------------------------------------------------------------------------- */

static void step(void)
{
    if (writes_left >= 0 && writes_left-- == 0)
        longjmp(out, KILLED);
}

static void before_write(const void *at)
{
    const uint8_t *byte = at;
    if (!shared)
        return;
    const uint8_t *data = (uint8_t *)shared + SHARED_HEAD_BYTES;
    if ((byte >= (uint8_t *)shared->slots && byte < (uint8_t *)&shared->slots[SLOT_COUNT]) ||
        (byte >= (uint8_t *)shared->parked && byte < (uint8_t *)&shared->parked[PARKED_COUNT]) ||
        (byte >= data && byte < data + (size_t)SLOT_COUNT * SLOT_BYTES))
        step();
}

#define PLAIN(size) \
    void __tsan_read##size(void *at) { (void)at; } \
    void __tsan_write##size(void *at) { before_write(at); }
#define UNALIGNED(size) \
    void __tsan_unaligned_read##size(void *at) { (void)at; } \
    void __tsan_unaligned_write##size(void *at) { before_write(at); }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)
UNALIGNED(2) UNALIGNED(4) UNALIGNED(8) UNALIGNED(16)

void __tsan_init(void) {}
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void) {}
void __tsan_read_range(void *at, size_t size) { (void)at, (void)size; }
void __tsan_write_range(void *at, size_t size) { (void)size; before_write(at); }

#define ATOMIC(bits, type) \
    type __tsan_atomic##bits##_load(const volatile type *at, int order) { (void)order; return *at; } \
    void __tsan_atomic##bits##_store(volatile type *at, type value, int order) \
    { (void)order; before_write((const void *)at); *at = value; } \
    type __tsan_atomic##bits##_fetch_add(volatile type *at, type value, int order) \
    { (void)order; before_write((const void *)at); type old = *at; *at = old + value; return old; } \
    type __tsan_atomic##bits##_fetch_sub(volatile type *at, type value, int order) \
    { (void)order; before_write((const void *)at); type old = *at; *at = old - value; return old; }
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)

void *seam_memset(void *to, int byte, size_t length)
{
    if (length > sizeof(struct fuse_in_header)) { /* the touching of a slot that is empty */
        before_write(to);
        return memset(to, byte, length);
    }
    for (size_t at = 0; at < length; at += 8) {
        before_write((uint8_t *)to + at);
        memset((uint8_t *)to + at, byte, length - at < 8 ? length - at : 8);
    }
    return to;
}

void *seam_memcpy(void *to, const void *from, size_t length)
{
    for (size_t at = 0; at < length; at += 8) {
        before_write((uint8_t *)to + at);
        memcpy((uint8_t *)to + at, (const uint8_t *)from + at, length - at < 8 ? length - at : 8);
    }
    return to;
}

/* --- system calls -------------------------------------------------------------------------------------------------- */

static ssize_t take_answer(const struct fuse_out_header *head, size_t length)
{
    step();
    note(ANSWER, head->unique, -head->error);
    return (ssize_t)length;
}

ssize_t seam_write(int fd, const void *data, size_t length)
{
    return fd == relay->device ? take_answer(data, length) : write(fd, data, length);
}

ssize_t seam_writev(int fd, const struct iovec *parts, int count)
{
    (void)fd, (void)count;
    return take_answer(parts[0].iov_base, ((struct fuse_out_header *)parts[0].iov_base)->len);
}

ssize_t seam_send(int fd, const void *data, size_t length, int flags)
{
    if (!room) {
        errno = EAGAIN;
        return -1;
    }
    step();
    ssize_t sent = send(fd, data, length, flags);
    if (sent < 0)
        return sent;
    room--;
    note(SENT, ((const struct fuse_in_header *)data)->unique, 0);
    return sent;
}

ssize_t seam_recv(int fd, void *data, size_t length, int flags)
{
    if (flags & MSG_PEEK && looks-- == 0)
        longjmp(out, BLOCKED);
    if (!(flags & MSG_PEEK))
        step();
    ssize_t got = recv(fd, data, length, flags | MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN && flags & MSG_PEEK)
        longjmp(out, BLOCKED);
    if (got > 0 && flags & MSG_TRUNC)
        note(DELIVERED, 0, 0);
    else if (got > 0 && !(flags & MSG_PEEK))
        note(UNREAD, 0, 0);
    return got;
}

int seam_poll(struct pollfd *fds, nfds_t count, int timeout)
{
    (void)fds, (void)count, (void)timeout;
    longjmp(out, BLOCKED);
}

int seam_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    (void)condition, (void)mutex;
    longjmp(out, BLOCKED);
}

int seam_lock(pthread_mutex_t *mutex) { (void)mutex; return 0; }
int seam_unlock(pthread_mutex_t *mutex) { (void)mutex; return 0; }

uint64_t monotonic_ns(void) { return 1; }

/* All callers whom somebody asks for are dying. */
FILE *seam_fopen(const char *path, const char *mode)
{
    static char status[] = "SigPnd:\t0000000000000100\n";
    (void)path, (void)mode;
    return fmemopen(status, sizeof status - 1, "r");
}

/* All requests have one owner. It may have `share` at Python and `places` in the lot. */
bool seam_full(const struct shares *shares, uint32_t owner)
{
    uint32_t held = shares_taken(shares, owner);
    return shares == &relay->passed_shares ? held >= share : shares == &relay->lot.shares && held >= places;
}

/* --- operations ----------------------------------------------------------------------------------------------------- */

#define OPERATION(name, parameters, body) \
    int name parameters \
    { \
        int how = setjmp(out); \
        if (!how) { body; } \
        writes_left = -1; \
        return how; \
    }

static uint32_t result; /* of the last operation that has one */

uint32_t last_result(void) { return result; }
struct event *event_list(void) { return events; }
uint32_t events_taken(void) { uint32_t count = event_count; event_count = 0; return count; }
void kill_before_write(int64_t number) { writes_left = number; }

void allow(uint32_t messages, uint32_t answers) { room = messages; looks = answers; }

int begin(uint32_t its_share, uint32_t its_places)
{
    if (shared)
        munmap(shared, SHARED_BYTES);
    shared = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    share = its_share, places = its_places, writes_left = -1, event_count = 0;
    if (shared != MAP_FAILED)
        shared->flags = READ_ONLY;
    return shared != MAP_FAILED;
}

/* What the kernel takes back of a process that has ended. */
void end_process(void)
{
    if (!relay)
        return;
    if (relay->python >= 0)
        close(relay->python);
    if (relay->python_end >= 0)
        close(relay->python_end);
    if (relay->work_ready > 0)
        close(relay->work_ready);
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++)
        free(relay->splits[slot]);
    free(relay->slot_shares.owners);
    free(relay->passed_shares.owners);
    free(relay->lot.shares.owners);
    free(fastpath);
    fastpath = NULL;
    relay = NULL;
}

int begin_process(void)
{
    fastpath = calloc(1, sizeof *fastpath);
    if (!fastpath)
        return 0;
    relay = &fastpath->relay;
    fastpath->shared = shared;
    relay->python = relay->python_end = -1;
    forget_interrupts();
    return 1;
}

OPERATION(start, (void), {
    result = relay_init(relay, shared, 1 << 20);
    interrupt_init(fastpath);
})

OPERATION(read_request, (uint32_t own, const struct fuse_in_header *message), {
    result = own == NO_SLOT ? relay_take_slot(relay) : own;
    relay_ready_slot(relay, result);
    step(); /* the kernel's copy and the end of the call are one: nothing runs in between */
    memcpy(slot_data(relay, result), message, message->len);
    note(ARRIVED, message->unique, 0);
    relay_fill_slot(relay, result, message->len, message->unique);
})

OPERATION(take_slot, (void), result = relay_take_slot(relay))

OPERATION(next_work, (uint32_t own), {
    relay_ready_slot(relay, own);
    result = relay_next_work(relay);
})

OPERATION(serve_hit, (uint32_t slot, bool is_work), {
    reply(relay->device, shared->slots[slot].unique, 0, NULL, 0);
    relay_unclaim(relay, slot);
    if (is_work)
        relay_free_slot(relay, slot);
})

OPERATION(serve_pass, (uint32_t slot, bool is_work), {
    result = relay_pass(relay, slot);
    if (is_work && !result)
        relay_free_slot(relay, slot);
})

OPERATION(fetched, (uint32_t slot), {
    reply(relay->device, shared->slots[slot].unique, 0, NULL, 0);
    relay_free_slot(relay, slot);
})

OPERATION(turn_sender, (void), relay_run_sender(relay))
/* The oldest entry of the queue, and no other. */
int run_sender_(void)
{
    uint32_t rest = relay->queue_count - 1;
    relay->queue_count = 1;
    int how = turn_sender(); /* it ends the process, or waits for something */
    relay->queue_count += rest;
    return how;
}

OPERATION(run_receiver_, (void), turn_receiver(relay))
OPERATION(attach, (int python, int python_end, bool same), relay_attach(relay, python, python_end, same))
OPERATION(hang_up, (void), relay_hang_up(relay))

OPERATION(send_doubt, (void), {
    result = relay_next_doubt(relay);
    relay_free_slot(relay, result);
})

OPERATION(give_up, (void), {
    relay->absent_since_ns = 0;
    relay_tick(relay);
})

static uint32_t fetching = NO_SLOT; /* the slot of the fetch that the interrupt is about */

bool miss_interrupt(struct misses *misses, uint64_t unique)
{
    (void)misses;
    if (fetching == NO_SLOT || shared->slots[fetching].unique != unique)
        return false;
    reply(relay->device, unique, EINTR, NULL, 0);
    relay_free_slot(relay, fetching);
    return true;
}

OPERATION(interrupt_, (uint64_t unique, uint32_t fetching_slot, bool again), {
    fetching = fetching_slot;
    if (again)
        interrupt_again(fastpath, unique);
    else
        interrupt(fastpath, unique);
})

/* --- looking ---------------------------------------------------------------------------------------------------------- */

struct relay_view {
    struct {
        uint64_t word, message, unique;
        uint32_t length, parts, attempts, split, counted;
    } slots[SLOT_COUNT];
    uint64_t lot[PARKED_COUNT]; /* the oldest first */
    uint32_t free_count, free[SLOT_COUNT], queue_count, queue[SLOT_COUNT], work_count, work[SLOT_COUNT];
    uint32_t has_python, going, given_up, interrupt_count;
    uint64_t interrupted[MAX_INTERRUPTED];
};

void look(struct relay_view *out)
{
    *out = (struct relay_view){.has_python = relay->python >= 0, .going = relay->going, .given_up = relay->given_up,
                         .free_count = relay->free_count, .work_count = relay->work_count};
    for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
        const struct slot_head *head = &shared->slots[slot];
        const struct fuse_in_header *message = slot_data(relay, slot);
        out->slots[slot].word = head->word;
        out->slots[slot].message = message->len < sizeof *message ? 0 : message->unique;
        out->slots[slot].unique = head->unique;
        out->slots[slot].length = head->length;
        out->slots[slot].parts = head->parts;
        out->slots[slot].attempts = head->attempts;
        out->slots[slot].split = relay->splits[slot] != NULL;
        out->slots[slot].counted = relay->counted_passed[slot];
        out->free[slot] = relay->free[slot];
        out->work[slot] = relay->work[(relay->work_head + slot) % SLOT_COUNT];
    }
    for (uint32_t number = 0; number < relay->queue_count; number++)
        out->queue[out->queue_count++] = relay->queue[(relay->queue_head + number) % SLOT_COUNT].slot;
    out->interrupt_count = interrupts_noted(out->interrupted);
    uint32_t count = 0;
    for (uint32_t place = relay->lot.first; place != NO_SLOT; place = relay->lot.next[place])
        out->lot[count++] = ((const struct fuse_in_header *)shared->parked[place].message)->unique;
}
