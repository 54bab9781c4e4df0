#include "serve/control.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "misses/miss_threads.h"
#include "misses/miss.h"
#include "relay/lot.h"
#include "relay/relay.h"
#include "relay/slots.h"
#include "serve/interrupt.h"

#define TICK_MS 200

static void daemon_gone(struct control_socket *control)
{
    daemon_connect(&control->fastpath->daemon, -1);
    if (control->fastpath->appender)
        append_daemon_gone(control->fastpath->appender);
    if (control->process < 0)
        relay_hang_up(&control->fastpath->relay);
}

/* A connection that ends does not mean that its daemon has died: a daemon may have made it to our predecessor and given it up.
 * Python is gone when the process is. */
static void process_gone(struct control_socket *control)
{
    close(control->process);
    control->process = -1;
    relay_hang_up(&control->fastpath->relay);
}

static void daemon_connected(struct control_socket *control, int daemon)
{
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    /* The daemon gets every descriptor of the mount. The socket's directory is closed to others, but its mode may have changed. */
    if (getsockopt(daemon, SOL_SOCKET, SO_PEERCRED, &peer, &length) || (peer.uid != 0 && peer.uid != geteuid())) {
        close(daemon);
        return;
    }
    if (control->process >= 0 && peer.pid != control->pid)
        process_gone(control);
    else if (control->process >= 0)
        close(control->process);
    control->pid = peer.pid;
    control->process = (int)syscall(SYS_pidfd_open, peer.pid, 0);
    daemon_connect(&control->fastpath->daemon, daemon);
}

#define MAX_DOUBT_BYTES 4096u /* the names of a request; never the bytes of a WRITE */

static void send_doubts(struct fastpath *fastpath)
{
    struct relay *relay = &fastpath->relay;
    uint32_t slot;
    while ((slot = relay_next_doubt(relay)) != NO_SLOT) {
        uint32_t length = fastpath->shared->slots[slot].length;
        length = length < MAX_DOUBT_BYTES ? length : MAX_DOUBT_BYTES;
        if (!daemon_send(&fastpath->daemon, CONTROL_IN_DOUBT, 0, 0, slot_data(relay, slot), length))
            return;
        relay_free_slot(relay, slot);
    }
}

/* False: the daemon is gone. */
static bool receive(struct control_socket *control)
{
    struct fastpath *fastpath = control->fastpath;
    struct control head;
    union ancillary ancillary;
    static struct prefetch_request requests[MAX_PREFETCH_REQUESTS]; /* used by the control thread only */
    struct iovec parts[] = {{&head, sizeof head}, {requests, sizeof requests}};
    struct msghdr message = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = ancillary.bytes, .msg_controllen = sizeof ancillary.bytes};
    ssize_t length = recvmsg(daemon_socket(&fastpath->daemon), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0)
        return errno == EAGAIN || errno == EINTR;
    if (length < (ssize_t)sizeof head)
        return false;
    int fds[MAX_DESCRIPTORS];
    size_t count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(c), count * sizeof(int));
    }
    if (head.type == CONTROL_ATTACH && count == 2) {
        relay_attach(&fastpath->relay, fds[0], fds[1], head.a & ATTACH_SAME_PYTHON);
        count = 0;
        daemon_send(&fastpath->daemon, CONTROL_ATTACHED, 0, 0, NULL, 0);
        send_doubts(fastpath);
        if (fastpath->appender)
            append_attached(fastpath->appender, head.a & ATTACH_SAME_PYTHON);
    } else if (head.type == CONTROL_HANDOVER) {
        int mount[] = {fastpath->device, control->shared_fd, fastpath->source, control->blob_fd, control->listener};
        daemon_send_descriptors(&fastpath->daemon, CONTROL_HANDED_OVER, (uint64_t)getpid(), mount, sizeof mount / sizeof *mount);
    } else if (head.type == CONTROL_SOURCE && count == 1) {
        dup3(fds[0], fastpath->source, O_CLOEXEC); /* under the number that all threads use */
    } else if (head.type == CONTROL_SLAB && fastpath->appender) {
        bool is_slab = head.a % SLAB_BYTES == 0 && head.a <= INT64_MAX - SLAB_BYTES;
        append_slab(fastpath->appender, is_slab ? head.a : UINT64_MAX);
    } else if (head.type == CONTROL_ROOM && fastpath->appender) {
        append_room(fastpath->appender, head.a);
    } else if (head.type == CONTROL_PREFETCH && fastpath->misses) {
        prefetch_requested(fastpath->misses, requests, ((size_t)length - sizeof head) / sizeof *requests);
    }
    while (count)
        close(fds[--count]);
    return true;
}

#define PF_EXITING 4 /* linux/sched.h */

/* A killed daemon keeps its sockets open while one of its threads waits in the kernel for a source that hangs: in a call,
 * or when it closes files (FLUSH). */
bool process_is_dying(pid_t pid)
{
    char path[32], text[256];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *name_end = strrchr(text, ')');
    char state;
    unsigned flags;
    if (!name_end || sscanf(name_end + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
        return false;
    return state == 'Z' || state == 'X' || flags & PF_EXITING;
}

void control_run(struct control_socket *control, int ended)
{
    struct fastpath *fastpath = control->fastpath;
    for (;;) {
        int daemon = daemon_socket(&fastpath->daemon);
        struct pollfd wait[] = {
            {ended, POLLIN, 0},
            /* One daemon at a time: the next one waits until this one is gone. */
            {daemon < 0 ? control->listener : daemon, POLLIN, 0},
            {daemon < 0 ? control->process : -1, POLLIN, 0},
        };
        int ready = poll(wait, 3, TICK_MS);
        relay_tick(&fastpath->relay);
        miss_tick(fastpath->misses);
        interrupt_tick(fastpath);
        if (index_is_outdated(&fastpath->index))
            return; /* the daemon starts another one */
        if (ready <= 0) {
            if (control->process >= 0 && process_is_dying(control->pid)) {
                if (daemon >= 0)
                    daemon_gone(control);
                process_gone(control);
            }
            continue;
        }
        if (wait[0].revents)
            return;
        if (wait[2].revents)
            process_gone(control);
        if (!wait[1].revents)
            continue;
        if (daemon < 0) {
            daemon = accept4(control->listener, NULL, NULL, SOCK_CLOEXEC);
            if (daemon >= 0)
                daemon_connected(control, daemon);
        } else if (!receive(control)) {
            daemon_gone(control);
        }
    }
}
