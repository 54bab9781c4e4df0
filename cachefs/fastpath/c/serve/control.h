/* The control socket: daemons connect, attach their Python, and leave or die. */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

struct fastpath;

struct control_socket {
    struct fastpath *fastpath;
    int listener, shared_fd, blob_fd;
    int process, pid; /* of the daemon that connected last: a pidfd (-1: it is dead) and a pid */
};

/* Serves until `ended` (an eventfd) is signalled. */
void control_run(struct control_socket *control, int ended);
/* Has its first thread ended? */
bool process_is_dying(pid_t pid);
