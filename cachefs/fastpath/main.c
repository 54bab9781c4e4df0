/* cachefs-fastpath: between /dev/fuse and pyfuse3. docs/FASTPATH.md says what it promises.
 *
 * Started by the daemon, which gives it descriptors: /dev/fuse, the shared memory, the source's directory, the blob and
 * a listening socket. It outlives the daemon, and ends when the mount does. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "control.h"
#include "fill.h"
#include "interrupt.h"
#include "serve.h"

#define STACK_BYTES (256u << 10)
#define LOOK_MS 20

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "fast path: %s: %s\n", what, why);
    return 1;
}

#define FIELD(type, field) \
    printf("%s{\"struct\": \"%s\", \"field\": \"%s\", \"offset\": %zu, \"size\": %zu}", comma, #type, #field, \
           offsetof(struct type, field), sizeof(((struct type *)0)->field)), comma = ",\n "

/* For the test that compares this with Python's structs. */
static int print_layout(void)
{
    const char *comma = "[";
    FIELD(inode_record, flags); FIELD(inode_record, mode); FIELD(inode_record, nlink); FIELD(inode_record, uid);
    FIELD(inode_record, gid); FIELD(inode_record, rdev); FIELD(inode_record, blksize); FIELD(inode_record, size);
    FIELD(inode_record, blocks); FIELD(inode_record, atime_ns); FIELD(inode_record, mtime_ns);
    FIELD(inode_record, ctime_ns); FIELD(inode_record, btime_ns); FIELD(inode_record, device);
    FIELD(inode_record, source_inode); FIELD(inode_record, version); FIELD(inode_record, stamp);
    FIELD(inode_record, entries_stamp); FIELD(inode_record, next_position); FIELD(inode_record, expires_ns);
    FIELD(inode_record, lookups);
    FIELD(dentry_record, flags); FIELD(dentry_record, inode); FIELD(dentry_record, stamp);
    FIELD(dentry_record, position);
    FIELD(extent_record, flags); FIELD(extent_record, length); FIELD(extent_record, blob_offset);
    FIELD(extent_record, version); FIELD(extent_record, record_bytes);
    FIELD(shared, magic); FIELD(shared, version); FIELD(shared, slot_count); FIELD(shared, slot_bytes);
    FIELD(shared, flags); FIELD(shared, threads); FIELD(shared, fetch_threads); FIELD(shared, seed);
    FIELD(shared, small_file_bytes); FIELD(shared, reconnect_timeout_ns); FIELD(shared, source_timeout_ns);
    FIELD(shared, simulate_latency_ns); FIELD(shared, root_device); FIELD(shared, run); FIELD(shared, floor);
    FIELD(shared, serving); FIELD(shared, capacity_bytes); FIELD(shared, committed_bytes); FIELD(shared, settled);
    FIELD(shared, pending_bytes); FIELD(shared, held_bytes); FIELD(shared, stuck); FIELD(shared, pid); FIELD(shared, passed); FIELD(shared, counters);
    FIELD(shared, wishes_done); FIELD(shared, wish_jobs); FIELD(shared, settle_ns); FIELD(shared, clock_offset_ns); FIELD(shared, strict_floor); FIELD(shared, accesses); FIELD(shared, latencies); FIELD(shared, slots); FIELD(slot_head, word);
    FIELD(shared, young); FIELD(access_log, entries); FIELD(access, when_and_unit);
    FIELD(wish, inode); FIELD(wish, offset);
    FIELD(filled, report); FIELD(filled, inode); FIELD(filled, offset); FIELD(filled, version);
    FIELD(filled, blob_offset); FIELD(filled, record_bytes); FIELD(filled, length); FIELD(filled, checksums);
    FIELD(control, type); FIELD(control, length); FIELD(control, a); FIELD(control, b);
    printf(",\n {\"shared_bytes\": %zu, \"counters\": %zu, \"threads\": %d, \"slot\": %zu, \"head_bytes\": %zu, "
           "\"slab\": %" PRIu64 "}]\n",
           SHARED_BYTES, sizeof(struct counters), MAX_THREADS, sizeof(struct slot_head), SHARED_HEAD_BYTES, SLAB_BYTES);
    return 0;
}

struct arguments {
    int device, shared, source, blob, listener;
    const char *session, *durable;
    int after; /* the pid of another one on the same memory; 0: there is none */
};

static bool parse_arguments(int count, char **values, struct arguments *out)
{
    *out = (struct arguments){-1, -1, -1, -1, -1, NULL, NULL, 0};
    struct { const char *name; int *fd; const char **path; } known[] = {
        {"--device", &out->device, NULL}, {"--shared", &out->shared, NULL},     {"--source", &out->source, NULL},
        {"--blob", &out->blob, NULL},     {"--listener", &out->listener, NULL}, {"--session", NULL, &out->session},
        {"--durable", NULL, &out->durable}, {"--after", &out->after, NULL},
    };
    for (int i = 1; i + 1 < count; i += 2)
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (!strcmp(values[i], known[k].name)) {
                if (known[k].fd)
                    *known[k].fd = atoi(values[i + 1]);
                else
                    *known[k].path = values[i + 1];
            }
    return out->device >= 0 && out->shared >= 0 && out->source >= 0 && out->blob >= 0 && out->listener >= 0 &&
           out->session && out->durable;
}

/* It holds what the mount is made of while we wait, and we go on with it, also if the daemon that started us is killed. */
static void wait_for_end(pid_t pid)
{
    struct pollfd wait = {(int)syscall(SYS_pidfd_open, pid, 0), POLLIN, 0};
    while (wait.fd >= 0 && poll(&wait, 1, LOOK_MS) <= 0 && !process_is_dying(pid)) /* a thread of it may wait for the source */
        ;
    if (wait.fd >= 0)
        close(wait.fd);
}

static struct shared *map_shared(int fd)
{
    struct shared *shared = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        return NULL;
    if (shared->magic != SHARED_MAGIC || shared->version != SHARED_VERSION || shared->slot_count != SLOT_COUNT ||
        shared->slot_bytes != SLOT_BYTES) {
        errno = EPROTO;
        return NULL;
    }
    return shared;
}

static int ended;

static void end(int signal)
{
    (void)signal;
    uint64_t one = 1;
    if (write(ended, &one, sizeof one) < 0)
        _exit(1);
}

static void *work(void *context)
{
    worker_run(context);
    end(0);
    return NULL;
}

int main(int count, char **values)
{
    if (count == 2 && !strcmp(values[1], "--layout"))
        return print_layout();
    struct arguments arguments;
    if (!parse_arguments(count, values, &arguments))
        return fail("usage", "this program is started by cachefs, not by hand");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a blob that may not grow is a full one */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);

    if (arguments.after)
        wait_for_end(arguments.after);

    static struct fastpath fastpath;
    static struct control_socket control;
    fastpath = (struct fastpath){.device = arguments.device, .source = arguments.source, .control = &control};
    if (!(fastpath.shared = map_shared(arguments.shared)))
        return fail("the shared memory cannot be used", strerror(errno));
    int error = index_open(&fastpath.index, arguments.session, arguments.durable, fastpath.shared);
    if (error)
        return fail("the index cannot be opened", mdb_strerror(error));
    if (!blob_open(&fastpath.blob, arguments.blob, fastpath.shared->seed))
        return fail("the blob cannot be opened", strerror(errno));
    if ((ended = eventfd(0, EFD_CLOEXEC)) < 0)
        return fail("eventfd", strerror(errno));
    signal(SIGTERM, end);
    if (fcntl(fastpath.device, F_SETFL, fcntl(fastpath.device, F_GETFL) | O_NONBLOCK)) /* `next_request` waits */
        return fail("/dev/fuse cannot be used", strerror(errno));
    fastpath.shared->pid = (uint64_t)getpid();

    pthread_mutex_init(&fastpath.turn, NULL);
    if (!relay_init(&fastpath.relay, fastpath.shared, fastpath.device))
        return fail("requests cannot be taken over", strerror(errno));
    interrupt_init(&fastpath);
    control_init(&control, &fastpath, arguments.listener, arguments.shared, arguments.blob);
    uint32_t threads = fastpath.shared->threads;
    if (!threads || threads > SLOTS_FOR_THREADS)
        return fail("the shared memory cannot be used", "impossible number of threads");
    if (fill_start(&fastpath, &control))
        return fail("threads cannot be started", strerror(errno));
    if ((error = relay_start(&fastpath.relay)))
        return fail("threads cannot be started", strerror(error));
    struct worker *workers = calloc(threads, sizeof *workers);
    uint8_t *scratch = buffer_memory((threads + 1) * (size_t)QUICK_BYTES);
    if (!workers || !scratch)
        return fail("threads cannot be set up", strerror(ENOMEM));
    fastpath.ahead.scratch = scratch + threads * (size_t)QUICK_BYTES;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (uint32_t i = 0; i < threads; i++) {
        if ((error = worker_init(&workers[i], &fastpath, &fastpath.shared->counters[i], scratch + i * (size_t)QUICK_BYTES)))
            return fail("a thread cannot be set up", mdb_strerror(error));
        if ((fastpath.shared->flags & LOGS_ACCESSES) && i < ACCESS_LOGS)
            workers[i].log = &fastpath.shared->accesses[i];
    }
    for (uint32_t i = 0; i < threads; i++)
        if ((error = pthread_create(&workers[i].thread, &attributes, work, &workers[i])))
            return fail("a thread cannot be started", strerror(error));
    control_run(&control, ended);
    fill_drain(fastpath.fill);
    relay_quiesce(&fastpath.relay);
    _exit(0); /* the mount is gone, or a successor takes over whatever the other threads are at */
}
