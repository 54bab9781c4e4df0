#include "appender/append.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <unistd.h>

#include "appender/record.h"
#include "appender/space.h"
#include "common/assertion.h"
#include "common/buffer.h"
#include "common/clock.h"

#define MAX_BATCH 128
#define RETRY_US 2000
#define GATHER_NS 10000000u /* fetches within it are appended and reported together: a wake-up costs more than a record */
#define GATHER_BYTES (1u << 20)
#define REST_NS 1000000000u
#define BEHIND_BYTES (8u << 20)
#define SECOND_NS 1000000000u
#define GRANT_TIMEOUT_S 2ull
#define DRAIN_TIMEOUT_S 10ull

struct appender {
    struct shared *shared;
    struct daemon *daemon;
    void *context;
    struct append_events events;
    pthread_t thread;
    pthread_cond_t changed; /* with appender_lock: of any of the fields below */

    struct fetch_queue queue GUARDED_BY(appender_lock);
    uint64_t queued_bytes GUARDED_BY(appender_lock); /* of records that wait to be appended */
    uint32_t queued_count GUARDED_BY(appender_lock);
    struct space space GUARDED_BY(appender_lock);
    bool asked GUARDED_BY(appender_lock); /* for a slab */
    bool idle GUARDED_BY(appender_lock);
    bool writing GUARDED_BY(appender_lock); /* into a slab */
    bool report_again GUARDED_BY(appender_lock); /* all that is not resolved, before anything else */
    _Atomic bool daemon_gone; /* changed by the control thread */
    uint64_t room_asked GUARDED_BY(appender_lock); /* the number of the last request for room */
    uint64_t room_answered GUARDED_BY(appender_lock);
    /* Used by the appender's thread only, but for `writer`: append_drain uses it while the thread is idle. */
    struct blob_writer writer;
    struct batched { struct fetch *fetch; struct extent extent; } batch[MAX_BATCH]; /* put, and not yet written */
    uint64_t batch_bytes;
    uint32_t batch_count, reports_used;
    uint8_t reports[REPORTS_BYTES];
};

struct lock appender_lock = LOCK_INIT;

static struct timespec after_ns(uint64_t ns)
{
    ns += monotonic_ns(); /* the clock of `changed` */
    return (struct timespec){.tv_sec = (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS)};
}

static bool admits_locked(struct appender *appender, uint64_t bytes, bool evicts) REQUIRES(appender_lock)
{
    if (appender->space.pending_count + appender->queued_count >= MAX_PENDING)
        return false;
    return evicts ? bytes <= appender->shared->capacity_bytes : space_has_locked(&appender->space, bytes, appender->queued_bytes);
}

bool append_admits(struct appender *appender, uint32_t length, bool prefetch)
{
    lock_take(&appender_lock);
    uint32_t evicts = appender->shared->flags & (prefetch ? EVICTS_FOR_PREFETCH : EVICTS);
    /* Fetches that were begun before the daemon died wait for the next daemon; nothing more is begun until then. */
    bool admitted = !appender->daemon_gone && admits_locked(appender, record_bytes(length), evicts);
    lock_release(&appender_lock);
    return admitted;
}

bool append_queue(struct appender *appender, struct fetch *fetch)
{
    uint64_t bytes = record_bytes(fetch->length);
    lock_take(&appender_lock);
    bool taken = admits_locked(appender, bytes, appender->shared->flags & EVICTS);
    if (taken) {
        queue_push(&appender->queue, fetch);
        appender->queued_bytes += bytes;
        appender->queued_count++;
        if (appender->idle || appender->queued_bytes >= GATHER_BYTES)
            pthread_cond_broadcast(&appender->changed);
    }
    lock_release(&appender_lock);
    return taken;
}

void append_slab(struct appender *appender, uint64_t offset)
{
    lock_take(&appender_lock);
    space_grant_locked(&appender->space, offset);
    appender->asked = false;
    pthread_cond_broadcast(&appender->changed);
    lock_release(&appender_lock);
}

void append_daemon_gone(struct appender *appender)
{
    appender->daemon_gone = true;
    append_slab(appender, UINT64_MAX); /* no slab is ours any more */
}

void append_room(struct appender *appender, uint64_t answered)
{
    lock_take(&appender_lock);
    if (answered <= appender->room_asked)
        appender->room_answered = answered;
    pthread_cond_broadcast(&appender->changed);
    lock_release(&appender_lock);
}

static void ask_locked(struct appender *appender) REQUIRES(appender_lock)
{
    if (appender->space.granted == UINT64_MAX && !appender->asked)
        appender->asked = daemon_send(appender->daemon, CONTROL_SLAB, 0, 0, NULL, 0);
}

/* False: no slab has room, and one was asked for. */
static bool place_locked(struct appender *appender, uint64_t bytes, uint64_t *at) REQUIRES(appender_lock)
{
    bool placed = space_place_locked(&appender->space, bytes, at);
    if (space_is_short_locked(&appender->space)) /* ask while there is still room in this one */
        ask_locked(appender);
    return placed;
}

bool append_send(struct appender *appender, enum control_type type, const uint8_t *data, uint32_t length)
{
    for (;;) {
        lock_take(&appender_lock); /* no other daemon is attached between the question and the message */
        bool may_send = !appender->daemon_gone && !appender->report_again;
        bool sent = may_send && daemon_send(appender->daemon, type, 0, 0, data, length);
        lock_release(&appender_lock);
        if (sent || !may_send)
            return sent;
        usleep(RETRY_US);
    }
}

/* Each daemon gets the reports in the order of their numbers: it resolves a number together with all before it. */
static void flush_reports(struct appender *appender)
{
    lock_take(&appender_lock);
    bool report_again = appender->report_again;
    appender->report_again = false;
    lock_release(&appender_lock);
    if (report_again) { /* those in `reports`, too */
        appender->events.report_again(appender->context);
        append_send(appender, CONTROL_ALL_REPORTED, NULL, 0);
    } else if (appender->reports_used) { /* what this cannot send is reported to the next daemon again */
        append_send(appender, CONTROL_FILLED, appender->reports, appender->reports_used);
    }
    appender->reports_used = 0;
}

static uint64_t report(struct appender *appender, const struct fetch *fetch, const struct extent *extent)
{
    uint64_t number = ++appender->shared->reported;
    if (appender->reports_used + MAX_REPORT_BYTES > REPORTS_BYTES)
        flush_reports(appender);
    ASSERT(appender->reports_used + MAX_REPORT_BYTES <= REPORTS_BYTES);
    appender->reports_used += encode_report(appender->reports + appender->reports_used, fetch, extent, number);
    return number;
}

/* `extent`: where the fetch was appended; NULL: it was not. */
static void complete(struct appender *appender, struct fetch *fetch, const struct extent *extent)
{
    uint64_t bytes = record_bytes(fetch->length), number = extent ? report(appender, fetch, extent) : 0;
    lock_take(&appender_lock);
    ASSERT(appender->queued_bytes >= bytes && appender->queued_count > 0);
    appender->queued_bytes -= bytes;
    appender->queued_count--;
    if (extent)
        space_report_locked(&appender->space, number, bytes);
    lock_release(&appender_lock);
    if (!extent)
        appender->shared->counters[0].skipped_admissions++;
    appender->events.appended(appender->context, fetch, extent, number);
}

/* Writes and reports what was put; if not `good`, none of it counts. */
static void finish_batch(struct appender *appender, bool good)
{
    good = good && blob_writer_flush(&appender->writer);
    if (!good) { /* the daemon counts it, logs it once, and stops admission for a while */
        daemon_send(appender->daemon, CONTROL_REFUSED, (uint64_t)errno, 0, NULL, 0);
        blob_writer_drop(&appender->writer);
    }
    for (uint32_t i = 0; i < appender->batch_count; i++)
        complete(appender, appender->batch[i].fetch, good ? &appender->batch[i].extent : NULL);
    appender->batch_count = 0;
    appender->batch_bytes = 0;
    lock_take(&appender_lock);
    if (!good) /* nothing is appended behind a partial write */
        space_leave_slab_locked(&appender->space);
    appender->writing = false;
    pthread_cond_broadcast(&appender->changed);
    lock_release(&appender_lock);
}

static void flush(struct appender *appender)
{
    if (appender->batch_count)
        finish_batch(appender, true);
    flush_reports(appender);
}

/* If there is no room, asks the daemon to evict. False: that was not enough, or took too long. */
static bool wait_for_room(struct appender *appender, uint64_t bytes)
{
    lock_take(&appender_lock);
    bool room = space_has_locked(&appender->space, bytes, appender->batch_bytes), waited = false;
    lock_release(&appender_lock);
    if (room)
        return true;
    flush(appender); /* the daemon cannot evict what was not reported to it */
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    lock_take(&appender_lock);
    room = space_has_locked(&appender->space, bytes, 0);
    if (!room && !appender->daemon_gone)
        daemon_send(appender->daemon, CONTROL_ROOM, ++appender->room_asked, 0, NULL, 0);
    while (!room && !waited && !appender->daemon_gone && appender->room_answered != appender->room_asked &&
           bytes <= appender->shared->capacity_bytes) {
        waited = !lock_wait_until(&appender_lock, &appender->changed, &deadline);
        room = space_has_locked(&appender->space, bytes, 0);
    }
    lock_release(&appender_lock);
    return room;
}

/* The place of a record. Waits for room and for a slab; a daemon that is gone may come back, or its successor may come. */
static bool place(struct appender *appender, uint64_t bytes, uint64_t *at)
{
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    if ((appender->shared->flags & EVICTS) && !wait_for_room(appender, bytes))
        return false; /* nothing is being written: the batch was flushed */
    lock_take(&appender_lock);
    bool placed = place_locked(appender, bytes, at);
    if (!placed) { /* while this thread waits, a daemon may come that waits for the end of all writing and for the reports */
        lock_release(&appender_lock);
        flush(appender);
        lock_take(&appender_lock);
    }
    while (!placed && !(placed = place_locked(appender, bytes, at))) {
        if (appender->daemon_gone) {
            lock_wait(&appender_lock, &appender->changed);
            deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
        } else if (!lock_wait_until(&appender_lock, &appender->changed, &deadline)) {
            break;
        }
    }
    appender->writing = placed || appender->batch_count;
    appender->writer.behind = appender->queued_bytes > BEHIND_BYTES;
    lock_release(&appender_lock);
    return placed;
}

static void append_one(struct appender *appender, struct fetch *fetch)
{
    uint64_t at = 0, bytes = record_bytes(fetch->length);
    if (!place(appender, bytes, &at)) {
        complete(appender, fetch, NULL);
        return;
    }
    ASSERT(appender->batch_count < MAX_BATCH);
    struct batched *last = &appender->batch[appender->batch_count++];
    last->fetch = fetch;
    appender->batch_bytes += bytes;
    bool good = put_record(&appender->writer, fetch, at, appender->shared->seed, &last->extent);
    if (!good || appender->batch_count == MAX_BATCH || appender->batch_bytes >= GATHER_BYTES)
        finish_batch(appender, good);
}

static bool has_work_locked(const struct appender *appender) REQUIRES(appender_lock)
{
    return appender->queue.first || appender->report_again;
}

/* Returns when there is work. After REST_NS without any, memory and space that are not used are given back. */
static void wait_for_work(struct appender *appender)
{
    struct timespec deadline = after_ns(REST_NS);
    lock_take(&appender_lock);
    appender->idle = true;
    pthread_cond_broadcast(&appender->changed);
    while (!has_work_locked(appender) && lock_wait_until(&appender_lock, &appender->changed, &deadline))
        ;
    if (!has_work_locked(appender)) {
        appender->idle = false; /* this thread uses `writer` */
        lock_release(&appender_lock);
        blob_writer_trim(&appender->writer);
        buffer_trim();
        malloc_trim(0);
        lock_take(&appender_lock);
        appender->idle = true;
        pthread_cond_broadcast(&appender->changed);
    }
    while (!has_work_locked(appender))
        lock_wait(&appender_lock, &appender->changed);
    appender->idle = false;
    lock_release(&appender_lock);
}

/* Does all the work that there is. False: none has come meanwhile. */
static bool work(struct appender *appender)
{
    struct fetch *fetch;
    lock_take(&appender_lock);
    while ((fetch = queue_pop(&appender->queue))) {
        lock_release(&appender_lock);
        append_one(appender, fetch);
        lock_take(&appender_lock);
    }
    lock_release(&appender_lock);
    flush(appender);
    struct timespec deadline = after_ns(GATHER_NS);
    lock_take(&appender_lock);
    while (appender->queued_bytes < GATHER_BYTES && lock_wait_until(&appender_lock, &appender->changed, &deadline))
        ;
    bool more = has_work_locked(appender);
    lock_release(&appender_lock);
    return more;
}

static void *run(void *context)
{
    for (;;) {
        wait_for_work(context);
        while (work(context))
            ;
    }
    return NULL;
}

void append_attached(struct appender *appender, bool same)
{
    lock_take(&appender_lock);
    while (appender->writing) /* into a slab of another daemon, which no longer keeps it for us */
        lock_wait(&appender_lock, &appender->changed);
    appender->daemon_gone = false;
    appender->report_again |= !same;
    appender->asked = false;
    ask_locked(appender);
    pthread_cond_broadcast(&appender->changed);
    lock_release(&appender_lock);
}

void append_drain(struct appender *appender)
{
    struct timespec deadline = after_ns(DRAIN_TIMEOUT_S * SECOND_NS);
    lock_take(&appender_lock);
    while ((appender->queue.first || !appender->idle) && !appender->daemon_gone &&
           lock_wait_until(&appender_lock, &appender->changed, &deadline))
        ;
    if (appender->idle)
        blob_writer_drop(&appender->writer);
    lock_release(&appender_lock);
}

uint64_t append_tick(struct appender *appender)
{
    lock_take(&appender_lock);
    space_update_locked(&appender->space);
    lock_release(&appender_lock);
    return appender->shared->resolved;
}

struct appender *append_start(struct shared *shared, struct daemon *daemon, int blob_fd, const struct append_events *events,
                              void *context)
{
    struct appender *appender = calloc(1, sizeof *appender);
    if (!appender)
        return NULL;
    appender->shared = shared;
    appender->daemon = daemon;
    appender->context = context;
    appender->events = *events;
    space_init(&appender->space, shared);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&appender->changed, &attributes);
    if (!blob_writer_open(&appender->writer, blob_fd) || (errno = pthread_create(&appender->thread, NULL, run, appender))) {
        free(appender);
        return NULL;
    }
    return appender;
}
