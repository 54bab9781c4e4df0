#include "appender/append.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "appender/record.h"
#include "appender/space.h"
#include "appender/stage.h"
#include "common/buffer.h"

#define MAX_BATCH 128
#define RETRY_US 2000
#define GATHER_NS 10000000u /* what comes within it is appended and reported together: to be woken costs more than a record */
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

    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t changed;
    struct fetch_queue queue;
    uint64_t queued_bytes;     /* records that wait to be appended */
    uint32_t queued_count;
    struct space space;
    bool asked, idle, writing, tell_again;
    _Atomic bool daemon_gone;  /* `tell` looks at it without the lock */
    uint64_t settled_seen;
    uint64_t room_asked, room_answered; /* requests for room, numbered */
    pthread_t thread;
    /* Of the thread alone. */
    struct stage stage;
    struct batched { struct fetch *fetch; struct extent extent; } batch[MAX_BATCH]; /* put, and not yet written */
    uint64_t batch_bytes;
    uint32_t batch_count, reports_used;
    uint8_t reports[REPORTS_BYTES];
};

static struct timespec after_ns(uint64_t ns)
{
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment); /* as `changed` does: nobody can set it */
    ns += (uint64_t)moment.tv_nsec;
    return (struct timespec){.tv_sec = moment.tv_sec + (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS)};
}

static bool admits_locked(struct appender *appender, uint64_t bytes, bool evicts)
{
    if (appender->space.unsettled_count + appender->queued_count >= MAX_UNSETTLED)
        return false;
    return evicts ? bytes <= appender->shared->capacity_bytes : space_has(&appender->space, bytes, appender->queued_bytes);
}

bool append_admits(struct appender *appender, uint32_t length, bool ahead)
{
    pthread_mutex_lock(&appender->lock);
    uint32_t evicts = appender->shared->flags & (ahead ? EVICTS_AHEAD : EVICTS);
    /* What was begun before the daemon died waits for the next one; nothing more is begun until then. */
    bool admitted = !appender->daemon_gone && admits_locked(appender, record_bytes(length), evicts);
    pthread_mutex_unlock(&appender->lock);
    return admitted;
}

bool append_queue(struct appender *appender, struct fetch *fetch)
{
    uint64_t bytes = record_bytes(fetch->length);
    pthread_mutex_lock(&appender->lock);
    bool taken = admits_locked(appender, bytes, appender->shared->flags & EVICTS);
    if (taken) {
        queue_push(&appender->queue, fetch);
        appender->queued_bytes += bytes;
        appender->queued_count++;
        if (appender->idle || appender->queued_bytes >= GATHER_BYTES)
            pthread_cond_broadcast(&appender->changed);
    }
    pthread_mutex_unlock(&appender->lock);
    return taken;
}

void append_slab(struct appender *appender, uint64_t offset)
{
    pthread_mutex_lock(&appender->lock);
    space_grant(&appender->space, offset);
    appender->asked = false;
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

void append_daemon_gone(struct appender *appender)
{
    pthread_mutex_lock(&appender->lock);
    appender->daemon_gone = true; /* what was reported may be lost with it; no slab is ours any more */
    space_grant(&appender->space, UINT64_MAX);
    appender->asked = false;
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

void append_room(struct appender *appender, uint64_t answered)
{
    pthread_mutex_lock(&appender->lock);
    if (answered <= appender->room_asked)
        appender->room_answered = answered;
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

static void ask_locked(struct appender *appender)
{
    if (appender->space.granted == UINT64_MAX && !appender->asked)
        appender->asked = daemon_send(appender->daemon, CONTROL_SLAB, 0, 0, NULL, 0);
}

/* False: no slab has room, and one was asked for. */
static bool place_locked(struct appender *appender, uint64_t bytes, uint64_t *at)
{
    bool placed = space_place(&appender->space, bytes, at);
    if (space_is_short(&appender->space)) /* ask while there is still room in this one */
        ask_locked(appender);
    return placed;
}

static bool tell(struct appender *appender, enum control_type type, const uint8_t *data, uint32_t length)
{
    bool sent = false;
    while (!sent && !appender->daemon_gone) {
        sent = daemon_send(appender->daemon, type, 0, 0, data, length);
        if (!sent)
            usleep(RETRY_US);
    }
    return sent;
}

bool append_tell(struct appender *appender, const uint8_t *reports, uint32_t length)
{
    return tell(appender, CONTROL_FILLED, reports, length);
}

static void flush_reports(struct appender *appender)
{
    if (appender->reports_used)
        append_tell(appender, appender->reports, appender->reports_used); /* if in vain, the next daemon is told again */
    appender->reports_used = 0;
}

static uint64_t report(struct appender *appender, const struct fetch *fetch, const struct extent *extent)
{
    uint64_t number = ++appender->shared->reported;
    if (appender->reports_used + MAX_REPORT_BYTES > REPORTS_BYTES)
        flush_reports(appender);
    appender->reports_used += encode_report(appender->reports + appender->reports_used, fetch, extent, number);
    return number;
}

/* `extent`: where it is, NULL if it is not. */
static void complete(struct appender *appender, struct fetch *fetch, const struct extent *extent)
{
    uint64_t bytes = record_bytes(fetch->length), number = extent ? report(appender, fetch, extent) : 0;
    pthread_mutex_lock(&appender->lock);
    appender->queued_bytes -= bytes;
    appender->queued_count--;
    if (extent)
        space_report(&appender->space, number, bytes);
    pthread_mutex_unlock(&appender->lock);
    if (!extent)
        appender->shared->counters[0].skipped_admissions++;
    appender->events.appended(appender->context, fetch, extent, number);
}

/* What was put is written and reported; or, if not `good`, none of it counts. */
static void finish_batch(struct appender *appender, bool good)
{
    good = good && stage_flush(&appender->stage);
    if (!good) { /* the daemon counts it, says so once, and stops admission for a while */
        daemon_send(appender->daemon, CONTROL_REFUSED, (uint64_t)errno, 0, NULL, 0);
        stage_drop(&appender->stage);
    }
    for (uint32_t i = 0; i < appender->batch_count; i++)
        complete(appender, appender->batch[i].fetch, good ? &appender->batch[i].extent : NULL);
    appender->batch_count = 0;
    appender->batch_bytes = 0;
    pthread_mutex_lock(&appender->lock);
    if (!good) /* what half a write left behind is never built upon */
        space_leave_slab(&appender->space);
    appender->writing = false;
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

/* The daemon evicts what its policy gives away. False: that is not enough, or takes so long that nobody should wait. */
static bool wait_for_room(struct appender *appender, uint64_t bytes)
{
    if (appender->batch_count)
        finish_batch(appender, true);
    flush_reports(appender); /* what the daemon has not heard of it cannot evict */
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    bool room = space_has(&appender->space, bytes, 0), waited = false;
    if (!room && !appender->daemon_gone)
        daemon_send(appender->daemon, CONTROL_ROOM, ++appender->room_asked, 0, NULL, 0);
    while (!room && !waited && !appender->daemon_gone && appender->room_answered != appender->room_asked &&
           bytes <= appender->shared->capacity_bytes) {
        waited = pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline);
        room = space_has(&appender->space, bytes, 0);
    }
    pthread_mutex_unlock(&appender->lock);
    return room;
}

/* The place of a record, perhaps after waiting for a slab. A daemon that has gone may come back, and the cache is its. */
static bool place(struct appender *appender, uint64_t bytes, uint64_t *at)
{
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    if ((appender->shared->flags & EVICTS) && !space_has(&appender->space, bytes, appender->batch_bytes)) {
        pthread_mutex_unlock(&appender->lock);
        bool room = wait_for_room(appender, bytes);
        pthread_mutex_lock(&appender->lock);
        if (!room) {
            appender->writing = appender->batch_count;
            pthread_mutex_unlock(&appender->lock);
            return false;
        }
    }
    bool placed = place_locked(appender, bytes, at);
    if (!placed) { /* while we wait a daemon may come, who waits for what is being written, and for the reports */
        pthread_mutex_unlock(&appender->lock);
        if (appender->batch_count)
            finish_batch(appender, true);
        flush_reports(appender);
        pthread_mutex_lock(&appender->lock);
    }
    while (!placed && !(placed = place_locked(appender, bytes, at))) {
        if (appender->daemon_gone) {
            pthread_cond_wait(&appender->changed, &appender->lock);
            deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
        } else if (pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline)) {
            break;
        }
    }
    appender->writing = placed || appender->batch_count;
    appender->stage.behind = appender->queued_bytes > BEHIND_BYTES;
    pthread_mutex_unlock(&appender->lock);
    return placed;
}

static void append_one(struct appender *appender, struct fetch *fetch)
{
    uint64_t at = 0, bytes = record_bytes(fetch->length);
    if (!place(appender, bytes, &at)) {
        complete(appender, fetch, NULL);
        return;
    }
    struct batched *last = &appender->batch[appender->batch_count++];
    last->fetch = fetch;
    appender->batch_bytes += bytes;
    bool good = put_record(&appender->stage, fetch, at, appender->shared->seed, &last->extent);
    if (!good || appender->batch_count == MAX_BATCH || appender->batch_bytes >= GATHER_BYTES)
        finish_batch(appender, good);
}

static bool has_work(const struct appender *appender)
{
    return appender->queue.first || appender->tell_again;
}

static void wait_locked(struct appender *appender)
{
    struct timespec deadline = after_ns(REST_NS);
    while (!has_work(appender) && !pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline))
        ;
    if (!has_work(appender)) {
        appender->idle = false; /* the stage is ours */
        pthread_mutex_unlock(&appender->lock);
        stage_trim(&appender->stage);
        buffer_trim(); /* what a burst of misses took */
        malloc_trim(0);
        pthread_mutex_lock(&appender->lock);
        appender->idle = true;
        pthread_cond_broadcast(&appender->changed);
    }
    while (!has_work(appender))
        pthread_cond_wait(&appender->changed, &appender->lock);
}

static void gather_locked(struct appender *appender)
{
    struct timespec deadline = after_ns(GATHER_NS);
    while (appender->queued_bytes < GATHER_BYTES &&
           !pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline))
        ;
}

static void *run(void *context)
{
    struct appender *appender = context;
    pthread_mutex_lock(&appender->lock);
    for (;;) {
        appender->idle = true;
        pthread_cond_broadcast(&appender->changed);
        wait_locked(appender);
        appender->idle = false;
        while (has_work(appender)) {
            struct fetch *fetch;
            if (appender->tell_again) {
                appender->tell_again = false;
                pthread_mutex_unlock(&appender->lock);
                appender->events.tell_again(appender->context);
                tell(appender, CONTROL_TOLD, NULL, 0);
                pthread_mutex_lock(&appender->lock);
            }
            while ((fetch = queue_pop(&appender->queue))) {
                pthread_mutex_unlock(&appender->lock);
                append_one(appender, fetch);
                pthread_mutex_lock(&appender->lock);
            }
            pthread_mutex_unlock(&appender->lock);
            if (appender->batch_count)
                finish_batch(appender, true);
            flush_reports(appender);
            pthread_mutex_lock(&appender->lock);
            gather_locked(appender);
        }
    }
    return NULL;
}

void append_attached(struct appender *appender, bool same)
{
    pthread_mutex_lock(&appender->lock);
    while (appender->writing) /* into a slab that was granted by another daemon, who is not there to keep it ours */
        pthread_cond_wait(&appender->changed, &appender->lock);
    appender->daemon_gone = false;
    appender->tell_again |= !same;
    appender->asked = false;
    ask_locked(appender);
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

void append_drain(struct appender *appender)
{
    struct timespec deadline = after_ns(DRAIN_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    while ((appender->queue.first || !appender->idle) && !appender->daemon_gone &&
           !pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline))
        ;
    if (appender->idle)
        stage_drop(&appender->stage);
    pthread_mutex_unlock(&appender->lock);
}

void append_tick(struct appender *appender)
{
    pthread_mutex_lock(&appender->lock);
    space_settle(&appender->space);
    uint64_t settled = appender->shared->settled;
    bool news = settled != appender->settled_seen;
    appender->settled_seen = settled;
    pthread_mutex_unlock(&appender->lock);
    if (news)
        appender->events.settled(appender->context, settled);
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
    pthread_mutex_init(&appender->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&appender->changed, &attributes);
    if (!stage_open(&appender->stage, blob_fd) || pthread_create(&appender->thread, NULL, run, appender)) {
        free(appender);
        return NULL;
    }
    return appender;
}
