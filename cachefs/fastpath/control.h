/* The fast path's side of its control socket: daemons come, attach their Python, and go or die. */
#ifndef CACHEFS_CONTROL_H
#define CACHEFS_CONTROL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "shared.h"

struct fastpath;

struct control_socket {
    struct fastpath *fastpath;
    int listener, shared_fd, blob_fd;
    pthread_mutex_t lock; /* of `daemon`, for those who send */
    int daemon;           /* the connection to the daemon of the moment, -1: none */
    int process, pid;     /* of whoever connected last: a pidfd, -1: dead */
};

void control_init(struct control_socket *control, struct fastpath *fastpath, int listener, int shared_fd, int blob_fd);
/* Serves until `ended` (an eventfd) is signalled. */
void control_run(struct control_socket *control, int ended);
/* Has its first thread ended? */
bool process_is_dying(pid_t pid);
/* From any thread. False: no daemon is there, or it does not keep up; nothing was sent. */
bool control_send(struct control_socket *control, uint32_t type, uint64_t a, uint64_t b, const void *data, size_t length);

#endif
