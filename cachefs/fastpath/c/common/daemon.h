/* The connection to the daemon of the moment: any thread may send on it. The control thread (serve/control.h) accepts it
 * and reads from it. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/shared.h"

#define MAX_DESCRIPTORS 8 /* in one message */

struct daemon {
    pthread_mutex_t lock; /* of `socket`, for those who send */
    int socket;           /* -1: no daemon is there */
};

void daemon_init(struct daemon *daemon);
/* Takes a new connection; -1: the last one is closed. */
void daemon_connect(struct daemon *daemon, int socket);
/* From any thread. False: no daemon is there, or it does not keep up; nothing was sent. */
bool daemon_send(struct daemon *daemon, uint32_t type, uint64_t a, uint64_t b, const void *data, size_t length);
/* The same with descriptors. */
bool daemon_send_descriptors(struct daemon *daemon, uint32_t type, uint64_t a, const int *fds, size_t count);
