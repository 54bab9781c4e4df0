#include "serve/serve.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "hits/answer.h"
#include "kernel/complaint.h"
#include "relay/lot.h"
#include "relay/passing.h"
#include "relay/slots.h"
#include "serve/interrupt.h"

#define BUSY_POLL_NS 50000
#define MAX_BUSY_POLL 8
#define SINGLE_READER_READS 64 /* consecutive READs of one process; then it counts as the only reader */

static void clamp_listing(const struct request *request)
{
    bool lists = request->header->opcode == FUSE_READDIR || request->header->opcode == FUSE_READDIRPLUS;
    struct fuse_read_in *in = request->body;
    if (lists && in->size > PART_BYTES) /* a shorter listing is allowed, and its message fits (hazard 5) */
        in->size = PART_BYTES;
}

static enum latency_kind kind_of(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_LOOKUP: return LATENCY_LOOKUP;
    case FUSE_GETATTR: return LATENCY_GETATTR;
    case FUSE_OPEN: case FUSE_OPENDIR: return LATENCY_OPEN;
    case FUSE_READ: return LATENCY_READ_HIT;
    case FUSE_READDIR: case FUSE_READDIRPLUS: return LATENCY_READDIR;
    default: return LATENCY_OTHER;
    }
}

/* Answers one request, or passes it on; then the slot no longer belongs to the worker. */
static void serve(struct worker *worker)
{
    struct relay *relay = &worker->fastpath->relay;
    struct slot_head *head = &worker->fastpath->shared->slots[worker->slot];
    struct request request;
    worker->begun_ns = monotonic_ns();
    if (!request_parse(slot_data(relay, worker->slot), head->length, &request)) {
        reply(worker->fastpath->device, head->unique, EIO, NULL, 0);
        worker->counters->failed++;
        return;
    }
    enum outcome outcome = ANSWERED;
    if (request.header->opcode == FUSE_INTERRUPT) /* it is never passed on (hazard 6) */
        interrupt(worker->fastpath, ((const struct fuse_interrupt_in *)request.body)->unique);
    else
        outcome = answer_request(worker, &request);
    view_end(&worker->view);
    if (outcome == ANSWERED) {
        relay_unclaim(relay, worker->slot);
        worker->counters->answered++;
        latency_note(worker->fastpath->shared, worker->counters, kind_of(request.header->opcode),
                     monotonic_ns() - worker->begun_ns);
        return;
    }
    if (outcome == PASS) {
        clamp_listing(&request);
        if (!relay_pass(relay, worker->slot))
            return;
    }
    worker->slot = NO_SLOT;
}

/* A request that does not come from /dev/fuse. It may take long: the next thread listens meanwhile. */
static void serve_work(struct worker *worker, uint32_t slot)
{
    struct relay *relay = &worker->fastpath->relay;
    uint32_t own = worker->slot;
    worker->slot = slot;
    leader_resign(worker);
    serve(worker);
    if (worker->slot != NO_SLOT)
        relay_free_slot(relay, worker->slot);
    worker->slot = own;
}

static bool takes_time(uint32_t opcode)
{
    return opcode == FUSE_READ || opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS;
}

/* Do several processes read at once? 0: the kernel does not know the process. */
static bool has_concurrent_readers(struct fastpath *fastpath, uint32_t pid) REQUIRES(leader_lock)
{
    if (pid != fastpath->reader || !pid)
        fastpath->concurrent_readers = SINGLE_READER_READS;
    else if (fastpath->concurrent_readers)
        fastpath->concurrent_readers--;
    fastpath->reader = pid;
    return fastpath->concurrent_readers;
}

/* Reads the next request; EAGAIN: there is work instead. As long as most requests come soon after the last one, it polls for a
 * while before it sleeps: a wake-up costs more than most answers. Between polls it yields to jobs that can run. */
static ssize_t next_request(struct fastpath *fastpath, void *message, uint64_t since_ns) REQUIRES(leader_lock)
{
    ssize_t length;
    struct pollfd wait[] = {{fastpath->device, POLLIN, 0}, {fastpath->relay.work_ready, POLLIN, 0}};
    while ((length = read(fastpath->device, message, SLOT_BYTES)) < 0 && errno == EAGAIN && !fastpath->relay.work_count) {
        if (fastpath->busy_poll && monotonic_ns() - since_ns < BUSY_POLL_NS)
            sched_yield();
        else
            poll(wait, 2, -1);
    }
    if (monotonic_ns() - since_ns >= BUSY_POLL_NS)
        fastpath->busy_poll /= 2;
    else if (fastpath->busy_poll < MAX_BUSY_POLL)
        fastpath->busy_poll++;
    return length;
}

void *serve_run(void *context)
{
    struct worker *worker = context;
    struct fastpath *fastpath = worker->fastpath;
    uint64_t done_ns = 0;
    leader_become(worker);
    for (;;) {
        if (worker->slot == NO_SLOT && (worker->slot = relay_take_slot(&fastpath->relay)) == NO_SLOT) {
            usleep(1000); /* not expected: SLOTS_FOR_THREADS */
            continue;
        }
        /* Work and requests from /dev/fuse alternate: neither waits until the other is exhausted. */
        worker->worked = !worker->worked;
        uint32_t work = worker->worked ? relay_next_work(&fastpath->relay) : NO_SLOT;
        if (work != NO_SLOT) {
            serve_work(worker, work);
            leader_become(worker);
            continue;
        }
        struct fuse_in_header *message = slot_data(&fastpath->relay, worker->slot);
        ssize_t length = next_request(fastpath, message, done_ns);
        if (length < 0 && (errno == ENODEV || errno == ECONNABORTED)) { /* unmounted; also while a request was read */
            leader_resign(worker);
            return NULL;
        }
        if (length < (ssize_t)sizeof *message) {
            if (length < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT) {
                complain("cannot read /dev/fuse");
                usleep(10000);
            }
            relay_ready_slot(&fastpath->relay, worker->slot);
            continue;
        }
        relay_fill_slot(&fastpath->relay, worker->slot, (uint32_t)length, message->unique);
        if (takes_time(message->opcode) && has_concurrent_readers(fastpath, message->pid))
            leader_resign(worker);
        serve(worker);
        if (worker->slot != NO_SLOT)
            relay_ready_slot(&fastpath->relay, worker->slot); /* the daemon sees that no answer is on its way (answers.py) */
        leader_become(worker);
        if (speculative_read_next(&fastpath->speculative_read, &worker->view, &fastpath->blob))
            worker->counters->guesses++;
        done_ns = monotonic_ns();
    }
}
