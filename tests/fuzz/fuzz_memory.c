/* The memory that a predecessor left, of any content: the relay takes stock of it. libFuzzer.
 *
 * The input says what is in the slots and in the lot. Whatever that is: no step outside memory, each slot is somebody's
 * or free, never both, and what is passed on to Python is a message that ends where its header says. */
#include <linux/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "relay/lot.h"
#include "relay/passing.h"
#include "relay/relay.h"

#define CHECK(condition)                                       \
    do {                                                       \
        if (!(condition)) {                                    \
            fprintf(stderr, "%s does not hold\n", #condition); \
            abort();                                           \
        }                                                      \
    } while (0)
#define TOUCHED 6 /* slots and places of the lot that the input speaks of: the first, and the last */
#define MOST_BYTES 120

static struct shared *shared;
static struct relay relay;
static int device;

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    (void)count, (void)arguments;
    /* With a page after it that nobody may touch. */
    size_t whole = (SHARED_BYTES + 4095) / 4096 * 4096;
    uint8_t *memory = mmap(NULL, whole + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED && !mprotect(memory + whole, 4096, PROT_NONE));
    shared = (struct shared *)memory;
    device = memfd_create("device", 0);
    return 0;
}

struct input {
    const uint8_t *at, *end;
};

static uint64_t number(struct input *input, int bytes)
{
    uint64_t value = 0;
    while (bytes--)
        value = value << 8 | (input->at < input->end ? *input->at++ : 0);
    return value;
}

/* A request of any kind; its length as its header says it, unless the input wants another. */
static uint32_t put_message(struct input *input, uint8_t *at)
{
    uint32_t length = sizeof(struct fuse_in_header) + (uint32_t)number(input, 1) % (MOST_BYTES - 40);
    struct fuse_in_header header = {.len = length, .opcode = (uint32_t)number(input, 1) % 60};
    header.unique = 2 * number(input, 1);
    header.uid = (uint32_t)number(input, 1) % 4;
    for (uint32_t i = sizeof header; i < length; i++)
        at[i] = (uint8_t)number(input, 1);
    if (number(input, 1) == 255)
        header.len = (uint32_t)number(input, 4);
    memcpy(at, &header, sizeof header);
    return length;
}

static void check_slots(void)
{
    static uint8_t seen[SLOT_COUNT];
    memset(seen, 0, sizeof seen);
    CHECK(relay.free_count <= SLOT_COUNT && relay.work_count <= SLOT_COUNT && relay.queue_count <= SLOT_COUNT);
    for (uint32_t i = 0; i < relay.free_count; i++) {
        CHECK(relay.free[i] < SLOT_COUNT && !seen[relay.free[i]]++);
        CHECK((shared->slots[relay.free[i]].word & 0xff) == SLOT_FREE);
    }
    for (uint32_t i = 0; i < relay.work_count; i++)
        CHECK(!seen[relay.work[(relay.work_head + i) % SLOT_COUNT]]++);
    for (uint32_t i = 0; i < relay.queue_count; i++) {
        uint32_t at = (relay.queue_head + i) % SLOT_COUNT;
        if (shared->slots[relay.queue[at].slot].word == relay.queue[at].word)
            CHECK(!seen[relay.queue[at].slot]++);
    }
}

static void drain(int python)
{
    static uint8_t message[256 << 10];
    ssize_t length;
    while ((length = recv(python, message, sizeof message, MSG_DONTWAIT)) > 0)
        CHECK(length >= (ssize_t)sizeof(struct fuse_in_header) && ((struct fuse_in_header *)message)->len == length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, data + size};
    memset(shared, 0, sizeof *shared);
    shared->reconnect_timeout_ns = 1;
    shared->flags = (uint32_t)number(&input, 1);
    uint8_t *slots = (uint8_t *)shared + SHARED_HEAD_BYTES;
    for (uint32_t i = 0; i < TOUCHED; i++) {
        uint32_t slot = i < TOUCHED - 1 ? i : SLOT_COUNT - 1;
        struct slot_head *head = &shared->slots[slot];
        memset(slots + (size_t)slot * SLOT_BYTES, 0, MOST_BYTES);
        head->word = number(&input, 1) << 8 | number(&input, 1) % 10;
        head->length = put_message(&input, slots + (size_t)slot * SLOT_BYTES);
        head->unique = ((struct fuse_in_header *)(slots + (size_t)slot * SLOT_BYTES))->unique;
        head->parts = (uint32_t)number(&input, 1) % 3;
        head->attempts = (uint32_t)number(&input, 1) % 3;
        uint8_t kind = (uint8_t)number(&input, 1);
        if (kind > 200) /* its header says the same, or something else */
            head->length = (uint32_t)number(&input, 3);
        if (kind > 240)
            ((struct fuse_in_header *)(slots + (size_t)slot * SLOT_BYTES))->len = head->length;
        struct parked *parked = &shared->parked[i < TOUCHED - 1 ? i : PARKED_COUNT - 1];
        if (number(&input, 1) % 2)
            parked->length = put_message(&input, parked->message);
        if (number(&input, 1) == 255)
            parked->length = (uint32_t)number(&input, 4);
    }
    CHECK(!ftruncate(device, 0) && lseek(device, 0, SEEK_SET) == 0);
    CHECK(relay_init(&relay, shared, device));
    check_slots();
    int ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
    bool early = number(&input, 1) % 2, same = number(&input, 1) % 2;
    if (early)
        relay_attach(&relay, ends[0], dup(ends[1]), same);
    check_slots();
    uint32_t slot, left = 2 * SLOT_COUNT;
    while ((slot = relay_next_work(&relay)) != NO_SLOT) {
        CHECK(slot < SLOT_COUNT && left--);
        if (number(&input, 1) % 2)
            relay_pass(&relay, slot);
        else
            relay_free_slot(&relay, slot);
    }
    for (uint64_t unique = 0; unique < 20; unique += 2)
        relay_interrupt(&relay, unique);
    while ((slot = relay_next_doubt(&relay)) != NO_SLOT)
        relay_free_slot(&relay, slot);
    if (!early)
        relay_attach(&relay, ends[0], dup(ends[1]), same);
    drain(ends[1]);
    relay_tick(&relay);
    close(relay.python);
    close(relay.python_end);
    close(ends[1]);
    close(relay.work_ready);
    free(relay.slot_shares.owners);
    free(relay.passed_shares.owners);
    free(relay.lot.shares.owners);
    for (slot = 0; slot < SLOT_COUNT; slot++)
        free(relay.splits[slot]);
    return 0;
}
