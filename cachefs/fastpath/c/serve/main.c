/* cachefs-fastpath: between /dev/fuse and pyfuse3. docs/FASTPATH.md describes it.
 *
 * Started by the daemon, which gives it descriptors: /dev/fuse, the shared memory, the source's directory, the blob and
 * a listening socket. It outlives the daemon, and ends when the mount does. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sysexits.h>
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

static void say(const char *what, int error)
{
    fprintf(stderr, "fast path: %s: %s\n", what, mdb_strerror(error));
}

/* A machine that has no memory, thread or descriptor left at the moment. launcher.py has them too. */
static bool is_shortage(int error)
{
    return error == EAGAIN || error == ENOMEM || error == EMFILE || error == ENFILE;
}

/* `error`: an errno or an LMDB error code. The daemon tries again for ever after EX_TEMPFAIL only. */
static int fail(const char *what, int error)
{
    say(what, error);
    return is_shortage(error) ? EX_TEMPFAIL : EXIT_FAILURE;
}

enum argument { DEVICE, SHARED, SOURCE, BLOB, LISTENER, SESSION_INDEX, DURABLE_INDEX, PREDECESSOR, ARGUMENTS };

/* PREDECESSOR: the pid of another fast path on the same memory. Only that one may be missing. */
static bool parse_arguments(int count, char **values, const char *out[ARGUMENTS])
{
    static const char *const names[ARGUMENTS] = {"--device", "--shared", "--source", "--blob", "--listener", "--session",
                                                 "--durable", "--after"};
    for (int i = 1; i + 1 < count; i += 2)
        for (int name = 0; name < ARGUMENTS; name++)
            if (!strcmp(values[i], names[name]))
                out[name] = values[i + 1];
    for (int name = 0; name < PREDECESSOR; name++)
        if (!out[name])
            return false;
    return true;
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

static void set_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL); /* children.py starts it with all signals blocked */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a blob that may not grow counts as full */
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
}

int main(int count, char **values)
{
    const char *arguments[ARGUMENTS] = {NULL};
    if (!parse_arguments(count, values, arguments))
        return fail("this program is started by cachefs, not by hand", EINVAL);
    set_signals();

    if (arguments[PREDECESSOR])
        wait_for_end(atoi(arguments[PREDECESSOR]));

    static struct fastpath fastpath;
    struct control_socket control = {.fastpath = &fastpath, .listener = atoi(arguments[LISTENER]), .process = -1,
                                     .shared_fd = atoi(arguments[SHARED]), .blob_fd = atoi(arguments[BLOB])};
    fastpath = (struct fastpath){
        .device = atoi(arguments[DEVICE]), .source = atoi(arguments[SOURCE]), .daemon = {.socket = -1}};
    if (!(fastpath.shared = map_shared(control.shared_fd)))
        return fail("the shared memory cannot be used", errno);
    int error = index_open(&fastpath.index, arguments[SESSION_INDEX], arguments[DURABLE_INDEX], fastpath.shared);
    if (is_shortage(error))
        return fail("the index cannot be opened", error);
    if (error) /* a disk that is dead: the daemon has the index open, and answers what it can */
        say("the index cannot be opened, so all requests are passed on", error);
    blob_open(&fastpath.blob, control.blob_fd, fastpath.shared->seed);
    if ((ended = eventfd(0, EFD_CLOEXEC)) < 0)
        return fail("eventfd", errno);
    signal(SIGTERM, end);
    if (fcntl(fastpath.device, F_SETFL, fcntl(fastpath.device, F_GETFL) | O_NONBLOCK)) /* `next_request` waits */
        return fail("/dev/fuse cannot be used", errno);
    fastpath.shared->pid = (uint64_t)getpid();

    if (!relay_init(&fastpath.relay, fastpath.shared, fastpath.device))
        return fail("requests cannot be taken over", errno);
    interrupt_init(&fastpath);
    uint32_t threads = fastpath.shared->threads;
    if (!threads || threads > SLOTS_FOR_THREADS)
        return fail("the shared memory has an impossible number of threads", EINVAL);
    if ((error = miss_start(&fastpath, control.blob_fd)))
        return fail("the threads for fetches cannot be started", error);
    if ((error = relay_start(&fastpath.relay)))
        return fail("the threads between kernel and Python cannot be started", error);
    struct worker *workers = calloc(threads, sizeof *workers);
    uint8_t *scratch = buffer_memory((threads + 1) * (size_t)QUICK_BYTES);
    if (!workers || !scratch)
        return fail("the memory of threads cannot be allocated", ENOMEM);
    lock_take(&leader_lock);
    fastpath.speculative_read.scratch = scratch + threads * (size_t)QUICK_BYTES;
    lock_release(&leader_lock);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (uint32_t i = 0; i < threads; i++) {
        if ((error = worker_init(&workers[i], &fastpath, &fastpath.shared->counters[i], scratch + i * (size_t)QUICK_BYTES)))
            return fail("a thread cannot be set up", error);
        if ((fastpath.shared->flags & LOGS_ACCESSES) && i < ACCESS_LOGS)
            workers[i].log = &fastpath.shared->accesses[i];
    }
    for (uint32_t i = 0; i < threads; i++)
        if ((error = pthread_create(&workers[i].thread, &attributes, work, &workers[i])))
            return fail("a thread cannot be started", error);
    control_run(&control, ended);
    if (fastpath.appender)
        append_drain(fastpath.appender);
    relay_quiesce(&fastpath.relay);
    _exit(0); /* the mount is gone, or a successor takes over the requests of the other threads */
}
