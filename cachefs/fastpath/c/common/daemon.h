/* The connection to the daemon that is there now. Any thread may send on it. The control thread (serve/control.h) accepts
 * connections and reads from this one. */
#pragma once

#include <sys/socket.h>

#include "common/lock.h"
#include "common/shared.h"

#define MAX_DESCRIPTORS 8 /* in one message */

union ancillary { /* memory for the descriptors of one message, as sendmsg and recvmsg have it */
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int) * MAX_DESCRIPTORS)];
};

struct daemon {
    int socket GUARDED_BY(daemon_lock); /* -1: there is no daemon; changed by the control thread only */
};

/* Replaces the connection and closes the last one; -1: there is none. Control thread. */
void daemon_connect(struct daemon *daemon, int socket) EXCLUDES(daemon_lock);
/* Any thread. False: nothing was sent, because there is no daemon or it does not keep up. */
bool daemon_send(struct daemon *daemon, uint32_t type, uint64_t a, uint64_t b, const void *data, size_t length)
    EXCLUDES(daemon_lock);
/* The same with descriptors. */
bool daemon_send_descriptors(struct daemon *daemon, uint32_t type, uint64_t a, const int *fds, size_t count)
    EXCLUDES(daemon_lock);

/* Control thread: no other thread changes the socket, so this one reads it without the lock. */
static inline UNCHECKED int daemon_socket(const struct daemon *daemon)
{
    return daemon->socket;
}
