#include "append.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SLAB_BYTES ((uint64_t)64 << 20)
#define BATCH_BYTES (32u << 10) /* of reports in one message */
#define RETRY_US 2000
#define GATHER_NS 10000000u /* what comes within it is appended and reported together: to be woken costs more than a record */
#define GATHER_BYTES (1u << 20)
#define SECOND_NS 1000000000u
#define GRANT_TIMEOUT_S 2ull
#define DRAIN_TIMEOUT_S 10ull
#define MAX_UNSETTLED (1u << 16) /* reports that wait for a commit */

struct appender {
    struct shared *shared;
    struct control_socket *control;
    struct blob blob; /* through the page cache */
    void *context;
    void (*appended)(void *, struct fetch *, const struct extent *, uint64_t);
    void (*settled)(void *, uint64_t);

    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t changed;
    struct fetch_queue queue;
    uint64_t queued_bytes;     /* records that wait to be appended */
    uint32_t queued_count;
    uint64_t next, end;        /* of the slab; equal: there is none */
    uint64_t granted;          /* offset of a slab that was granted and not begun, UINT64_MAX: none */
    bool asked, daemon_gone, idle, writing;
    uint64_t settled_seen;
    struct unsettled { uint64_t report, bytes; } unsettled[MAX_UNSETTLED];
    uint32_t unsettled_first, unsettled_count;
    uint64_t unsettled_bytes;
    pthread_t thread;
    /* Of the thread alone. */
    uint32_t batch_used;
    uint8_t batch[BATCH_BYTES];
};

static struct timespec after_ns(uint64_t ns)
{
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    ns += (uint64_t)moment.tv_nsec;
    return (struct timespec){.tv_sec = moment.tv_sec + (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS)};
}

static uint64_t record_bytes(uint32_t length)
{
    return (RECORD_HEADER_BYTES + 8 * (uint64_t)block_count(length) + length + 7) / 8 * 8;
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

static bool admits_locked(struct appender *appender, uint64_t bytes)
{
    settle_locked(appender); /* first: what is settled after this is counted twice, not missed */
    uint64_t used = appender->shared->committed_bytes + appender->unsettled_bytes + appender->queued_bytes;
    return !appender->daemon_gone && appender->unsettled_count + appender->queued_count < MAX_UNSETTLED &&
           used + bytes <= appender->shared->capacity_bytes;
}

bool append_admits(struct appender *appender, uint32_t length)
{
    pthread_mutex_lock(&appender->lock);
    bool admitted = admits_locked(appender, record_bytes(length));
    pthread_mutex_unlock(&appender->lock);
    return admitted;
}

bool append_queue(struct appender *appender, struct fetch *fetch)
{
    uint64_t bytes = record_bytes(fetch->length);
    pthread_mutex_lock(&appender->lock);
    bool taken = admits_locked(appender, bytes);
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

const struct blob *append_blob(struct appender *appender)
{
    return &appender->blob;
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

static bool write_all(int fd, struct iovec *parts, int count, uint64_t offset)
{
    while (count) {
        ssize_t written = pwritev(fd, parts, count, (off_t)offset);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        offset += (uint64_t)written;
        while (count && (size_t)written >= parts->iov_len) {
            written -= (ssize_t)parts->iov_len;
            parts++;
            count--;
        }
        if (count) {
            parts->iov_base = (char *)parts->iov_base + written;
            parts->iov_len -= (size_t)written;
        }
    }
    return true;
}

static bool write_record(struct appender *appender, const struct fetch *fetch, uint64_t at, struct extent *extent)
{
    uint64_t seed = appender->blob.seed;
    uint32_t blocks = block_count(fetch->length);
    for (uint32_t block = 0; block < blocks; block++) {
        uint32_t from = block * BLOCK_BYTES, rest = fetch->length - from;
        extent->checksums[block] = checksum(fetch->payload + from, rest < BLOCK_BYTES ? rest : BLOCK_BYTES, seed);
    }
    const struct inode_record *record = &fetch->record;
    struct record_header header = {
        .magic = RECORD_MAGIC,
        .format = RECORD_FORMAT,
        .type = RECORD_DATA,
        .length = fetch->length,
        .inode = fetch->inode,
        .file_offset = fetch->offset,
        .version = record->version,
        .size = record->size,
        .mtime_ns = record->mtime_ns,
        .ctime_ns = record->ctime_ns,
        .btime_ns = record->btime_ns,
        .device = record->device,
        .source_inode = record->source_inode,
        .mode = record->mode,
        .blocks = blocks,
        .table_checksum = checksum(extent->checksums, blocks * sizeof(uint64_t), seed),
    };
    header.checksum = checksum(&header, offsetof(struct record_header, checksum), seed);
    static const uint8_t zeros[8];
    uint64_t front = sizeof header + blocks * sizeof(uint64_t), whole = record_bytes(fetch->length);
    extent->record = (struct extent_record){
        .flags = PINNED,
        .length = fetch->length,
        .blob_offset = at + front,
        .version = record->version,
        .record_bytes = whole,
    };
    struct iovec parts[] = {
        {&header, sizeof header},
        {extent->checksums, blocks * sizeof(uint64_t)},
        {fetch->payload, fetch->length},
        {(void *)zeros, (size_t)(whole - front - fetch->length)},
    };
    return write_all(appender->blob.fd, parts, 4, at);
}

/* Sends what has gathered. Waits for a daemon that is slow, gives up on one that has gone. */
static void flush_reports(struct appender *appender)
{
    while (appender->batch_used && !appender->daemon_gone &&
           !control_send(appender->control, CONTROL_FILLED, 0, 0, appender->batch, appender->batch_used))
        usleep(RETRY_US);
    appender->batch_used = 0;
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
    if (appender->batch_used + MAX_REPORT_BYTES > BATCH_BYTES)
        flush_reports(appender);
    appender->batch_used += encode_report(appender->batch + appender->batch_used, fetch, extent, number);
    return number;
}

static void append_one(struct appender *appender, struct fetch *fetch)
{
    struct extent extent;
    uint64_t at = 0, bytes = record_bytes(fetch->length), number = 0;
    struct timespec deadline = after_ns(GRANT_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    bool placed;
    while (!(placed = place_locked(appender, bytes, &at)) && !appender->daemon_gone &&
           !pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline))
        ;
    appender->writing = placed;
    pthread_mutex_unlock(&appender->lock);
    bool written = placed && write_record(appender, fetch, at, &extent);
    if (placed && !written) /* the daemon counts it, says so once, and stops admission for a while */
        control_send(appender->control, CONTROL_REFUSED, (uint64_t)errno, 0, NULL, 0);
    if (written)
        number = report(appender, fetch, &extent);
    pthread_mutex_lock(&appender->lock);
    appender->writing = false;
    pthread_cond_broadcast(&appender->changed);
    appender->queued_bytes -= bytes;
    appender->queued_count--;
    if (written) {
        uint32_t last = (appender->unsettled_first + appender->unsettled_count++) % MAX_UNSETTLED;
        appender->unsettled[last] = (struct unsettled){number, bytes};
        appender->unsettled_bytes += bytes;
        settle_locked(appender); /* it counts as pending before it no longer counts as held */
    } else if (placed) { /* what half a write left behind is never built upon */
        appender->next = appender->end = 0;
    }
    pthread_mutex_unlock(&appender->lock);
    if (!written)
        appender->shared->counters[0].skipped_admissions++;
    appender->appended(appender->context, fetch, written ? &extent : NULL, number);
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
        while (!appender->queue.first)
            pthread_cond_wait(&appender->changed, &appender->lock);
        appender->idle = false;
        while (appender->queue.first) {
            struct fetch *fetch;
            while ((fetch = queue_pop(&appender->queue))) {
                pthread_mutex_unlock(&appender->lock);
                append_one(appender, fetch);
                pthread_mutex_lock(&appender->lock);
            }
            pthread_mutex_unlock(&appender->lock);
            flush_reports(appender);
            pthread_mutex_lock(&appender->lock);
            gather_locked(appender);
        }
    }
    return NULL;
}

void append_attached(struct appender *appender)
{
    pthread_mutex_lock(&appender->lock);
    while (appender->writing) /* into a slab that was granted by another daemon, who is not there to keep it ours */
        pthread_cond_wait(&appender->changed, &appender->lock);
    appender->daemon_gone = false;
    appender->asked = false;
    ask_locked(appender);
    pthread_mutex_unlock(&appender->lock);
}

void append_drain(struct appender *appender)
{
    struct timespec deadline = after_ns(DRAIN_TIMEOUT_S * SECOND_NS);
    pthread_mutex_lock(&appender->lock);
    while ((appender->queue.first || !appender->idle) &&
           !pthread_cond_timedwait(&appender->changed, &appender->lock, &deadline))
        ;
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
        appender->settled(appender->context, settled);
}

struct appender *append_start(struct shared *shared, struct control_socket *control, int blob_fd, void *context,
                              void (*appended)(void *, struct fetch *, const struct extent *, uint64_t),
                              void (*settled)(void *, uint64_t))
{
    struct appender *appender = calloc(1, sizeof *appender);
    if (!appender)
        return NULL;
    appender->shared = shared;
    appender->control = control;
    appender->blob = (struct blob){.fd = blob_fd, .direct = true, .seed = shared->seed}; /* its pages stay until they are on disk */
    appender->context = context;
    appender->appended = appended;
    appender->settled = settled;
    appender->granted = UINT64_MAX;
    shared->pending_bytes = 0;
    pthread_mutex_init(&appender->lock, NULL);
    pthread_cond_init(&appender->changed, NULL);
    if (pthread_create(&appender->thread, NULL, run, appender)) {
        free(appender);
        return NULL;
    }
    return appender;
}
