#include "append.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "buffer.h"
#include "record.h"
#include "stage.h"

#define MAX_BATCH 128
#define RETRY_US 2000
#define GATHER_NS 10000000u /* what comes within it is appended and reported together: to be woken costs more than a record */
#define GATHER_BYTES (1u << 20)
#define REST_NS 1000000000u
#define BEHIND_BYTES (8u << 20)
#define SECOND_NS 1000000000u
#define GRANT_TIMEOUT_S 2ull
#define DRAIN_TIMEOUT_S 10ull
#define MAX_UNSETTLED (1u << 16) /* reports that wait for a commit */

struct appender {
    struct shared *shared;
    struct control_socket *control;
    void *context;
    struct append_events events;

    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t changed;
    struct fetch_queue queue;
    uint64_t queued_bytes;     /* records that wait to be appended */
    uint32_t queued_count;
    uint64_t next, end;        /* of the slab; equal: there is none */
    uint64_t granted;          /* offset of a slab that was granted and not begun, UINT64_MAX: none */
    bool asked, idle, writing, tell_again;
    _Atomic bool daemon_gone;  /* `tell` looks at it without the lock */
    uint64_t settled_seen;
    uint64_t room_asked, room_answered; /* requests for room, numbered */
    struct unsettled { uint64_t report, bytes; } unsettled[MAX_UNSETTLED];
    uint32_t unsettled_first, unsettled_count;
    uint64_t unsettled_bytes;
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

/* What was reported and is settled by now no longer counts as pending: the index counts it. */
static void settle_locked(struct appender *appender)
{
    uint64_t settled = appender->shared->settled;
    while (appender->unsettled_count && appender->unsettled[appender->unsettled_first].report <= settled) {
        appender->unsettled_bytes -= appender->unsettled[appender->unsettled_first].bytes;
        appender->unsettled_first = (appender->unsettled_first + 1) % MAX_UNSETTLED;
        appender->unsettled_count--;
    }
    appender->shared->pending_bytes = appender->unsettled_bytes;
}

/* `waiting`: of other records that will be appended first. */
static bool has_room_locked(struct appender *appender, uint64_t bytes, uint64_t waiting)
{
    settle_locked(appender); /* first: what is settled after this is counted twice, not missed */
    return appender->shared->committed_bytes + appender->unsettled_bytes + waiting + bytes <= appender->shared->capacity_bytes;
}

static bool admits_locked(struct appender *appender, uint64_t bytes, bool evicts)
{
    if (appender->unsettled_count + appender->queued_count >= MAX_UNSETTLED)
        return false;
    return evicts ? bytes <= appender->shared->capacity_bytes : has_room_locked(appender, bytes, appender->queued_bytes);
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
    appender->granted = offset;
    appender->next = appender->end = 0; /* whatever there was: the daemon has a reason to grant another */
    appender->asked = false;
    pthread_cond_broadcast(&appender->changed);
    pthread_mutex_unlock(&appender->lock);
}

void append_daemon_gone(struct appender *appender)
{
    pthread_mutex_lock(&appender->lock);
    appender->daemon_gone = true; /* what was reported may be lost with it; no slab is ours any more */
    appender->granted = UINT64_MAX;
    appender->next = appender->end = 0;
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
    if (appender->granted == UINT64_MAX && !appender->asked)
        appender->asked = control_send(appender->control, CONTROL_SLAB, 0, 0, NULL, 0);
}

/* The place of a record: a record never crosses the end of a slab. False: no slab has room, and one was asked for. */
static bool place_locked(struct appender *appender, uint64_t bytes, uint64_t *at)
{
    if (appender->next + bytes > appender->end && appender->granted != UINT64_MAX) {
        appender->next = appender->granted;
        appender->end = appender->granted + SLAB_BYTES;
        appender->granted = UINT64_MAX;
    }
    bool room = appender->end && appender->next + bytes <= appender->end;
    if (room) {
        *at = appender->next;
        appender->next += bytes;
    }
    /* Ask for the next slab while there is still room in this one. */
    if (appender->next + SLAB_BYTES / 4 > appender->end)
        ask_locked(appender);
    return room;
}

static bool tell(struct appender *appender, enum control_type type, const uint8_t *data, uint32_t length)
{
    bool sent = false;
    while (!sent && !appender->daemon_gone) {
        sent = control_send(appender->control, type, 0, 0, data, length);
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

uint32_t encode_report(uint8_t *out, const struct fetch *fetch, const struct extent *extent, uint64_t number)
{
    uint32_t count = block_count(fetch->length);
    struct filled filled = {
        .report = number,
        .inode = fetch->inode,
        .offset = fetch->offset,
        .version = extent->record.version,
        .blob_offset = extent->record.blob_offset,
        .record_bytes = extent->record.record_bytes,
        .length = fetch->length,
        .checksums = count,
    };
    memcpy(out, &filled, sizeof filled);
    memcpy(out + sizeof filled, extent->checksums, count * sizeof(uint64_t));
    return (uint32_t)(sizeof filled + count * sizeof(uint64_t));
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
    if (extent) {
        uint32_t last = (appender->unsettled_first + appender->unsettled_count++) % MAX_UNSETTLED;
        appender->unsettled[last] = (struct unsettled){number, bytes};
        appender->unsettled_bytes += bytes;
        settle_locked(appender); /* it counts as pending before it no longer counts as held */
    }
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
        control_send(appender->control, CONTROL_REFUSED, (uint64_t)errno, 0, NULL, 0);
        stage_drop(&appender->stage);
    }
    for (uint32_t i = 0; i < appender->batch_count; i++)
        complete(appender, appender->batch[i].fetch, good ? &appender->batch[i].extent : NULL);
    appender->batch_count = 0;
    appender->batch_bytes = 0;
    pthread_mutex_lock(&appender->lock);
    if (!good) /* what half a write left behind is never built upon */
        appender->next = appender->end = 0;
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
    bool room = has_room_locked(appender, bytes, 0), waited = false;
    if (!room && !appender->daemon_gone)
        control_send(appender->control, CONTROL_ROOM, ++appender->room_asked, 0, NULL, 0);
    while (!room && !waited && !appender->daemon_gone && appender->room_answered != appender->room_asked &&
           bytes <= appender->shared->capacity_bytes) {
        waited = pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline);
        room = has_room_locked(appender, bytes, 0);
    }
    pthread_mutex_unlock(&appender->lock);
    return room;
}

/* The place of a record, perhaps after waiting for a slab. A daemon that has gone may come back, and the cache is its. */
static bool place(struct appender *appender, uint64_t bytes, uint64_t *at)
{
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    if ((appender->shared->flags & EVICTS) && !has_room_locked(appender, bytes, appender->batch_bytes)) {
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
    if (!placed && appender->batch_count) { /* while we wait a daemon may come, who waits for what is being written */
        pthread_mutex_unlock(&appender->lock);
        finish_batch(appender, true);
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
    settle_locked(appender);
    uint64_t settled = appender->shared->settled;
    bool news = settled != appender->settled_seen;
    appender->settled_seen = settled;
    pthread_mutex_unlock(&appender->lock);
    if (news)
        appender->events.settled(appender->context, settled);
}

struct appender *append_start(struct shared *shared, struct control_socket *control, int blob_fd,
                              const struct append_events *events, void *context)
{
    struct appender *appender = calloc(1, sizeof *appender);
    if (!appender)
        return NULL;
    appender->shared = shared;
    appender->control = control;
    appender->context = context;
    appender->events = *events;
    appender->granted = UINT64_MAX;
    shared->pending_bytes = 0;
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
