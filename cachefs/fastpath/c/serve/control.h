/* The fast path's side of its control socket: daemons come, attach their Python, and go or die. */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

struct fastpath;

struct control_socket {
    struct fastpath *fastpath;
    int listener, shared_fd, blob_fd;
    int process, pid; /* of the daemon that connected last: a pidfd, -1: dead */
};

void control_init(struct control_socket *control, struct fastpath *fastpath, int listener, int shared_fd, int blob_fd);
/* Serves until `ended` (an eventfd) is signalled. */
void control_run(struct control_socket *control, int ended);
/* Has its first thread ended? */
bool process_is_dying(pid_t pid);
