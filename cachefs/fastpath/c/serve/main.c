/* cachefs-fastpath: between /dev/fuse and pyfuse3. docs/FASTPATH.md describes it.
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

#include "appender/append.h"
#include "common/buffer.h"
#include "misses/miss.h"
#include "relay/relay.h"
#include "serve/control.h"
#include "serve/interrupt.h"
#include "serve/serve.h"

#define STACK_BYTES (256u << 10)
#define LOOK_MS 20

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "fast path: %s: %s\n", what, why);
    return 1;
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

/* The other process has the mount while this one waits. This one goes on with it even if the daemon that started it is killed. */
static void wait_for_end(pid_t pid)
{
    struct pollfd wait = {(int)syscall(SYS_pidfd_open, pid, 0), POLLIN, 0};
    while (wait.fd >= 0 && poll(&wait, 1, LOOK_MS) <= 0 && !process_is_dying(pid)) /* one of its threads may wait for the source */
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
    serve_run(context);
    end(0);
    return NULL;
}

int main(int count, char **values)
{
    struct arguments arguments;
    if (!parse_arguments(count, values, &arguments))
        return fail("usage", "this program is started by cachefs, not by hand");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a blob that may not grow counts as full */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);

    if (arguments.after)
        wait_for_end(arguments.after);

    static struct fastpath fastpath;
    static struct control_socket control;
    fastpath = (struct fastpath){.device = arguments.device, .source = arguments.source, .daemon = {.socket = -1}};
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

    if (!relay_init(&fastpath.relay, fastpath.shared, fastpath.device))
        return fail("requests cannot be taken over", strerror(errno));
    interrupt_init(&fastpath);
    control_init(&control, &fastpath, arguments.listener, arguments.shared, arguments.blob);
    uint32_t threads = fastpath.shared->threads;
    if (!threads || threads > SLOTS_FOR_THREADS)
        return fail("the shared memory cannot be used", "impossible number of threads");
    if (miss_start(&fastpath, arguments.blob))
        return fail("threads cannot be started", strerror(errno));
    if ((error = relay_start(&fastpath.relay)))
        return fail("threads cannot be started", strerror(error));
    struct worker *workers = calloc(threads, sizeof *workers);
    uint8_t *scratch = buffer_memory((threads + 1) * (size_t)QUICK_BYTES);
    if (!workers || !scratch)
        return fail("threads cannot be set up", strerror(ENOMEM));
    lock_take(&leader_lock);
    fastpath.speculative_read.scratch = scratch + threads * (size_t)QUICK_BYTES;
    lock_release(&leader_lock);
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
    if (fastpath.appender)
        append_drain(fastpath.appender);
    relay_quiesce(&fastpath.relay);
    _exit(0); /* the mount is gone, or a successor takes over the requests of the other threads */
}
