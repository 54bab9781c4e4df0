#include "common/daemon.h"

#include <string.h>
#include <unistd.h>

#include "common/assertion.h"

struct lock daemon_lock = LOCK_INIT;

void daemon_connect(struct daemon *daemon, int socket)
{
    lock_take(&daemon_lock);
    if (daemon->socket >= 0)
        close(daemon->socket);
    daemon->socket = socket;
    lock_release(&daemon_lock);
}

static bool send_message(struct daemon *daemon, struct control *head, const void *data, size_t length, const int *fds, size_t count)
{
    ASSERT(count <= MAX_DESCRIPTORS);
    union ancillary ancillary = {0};
    struct iovec parts[2] = {{head, sizeof *head}, {(void *)data, length}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = length ? 2 : 1};
    if (count) {
        message.msg_control = ancillary.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(rights), fds, sizeof(int) * count);
    }
    lock_take(&daemon_lock);
    bool sent = daemon->socket >= 0 &&
                sendmsg(daemon->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)(sizeof *head + length);
    lock_release(&daemon_lock);
    return sent;
}

bool daemon_send(struct daemon *daemon, uint32_t type, uint64_t a, uint64_t b, const void *data, size_t length)
{
    return send_message(daemon, &(struct control){type, (uint32_t)length, a, b}, data, length, NULL, 0);
}

bool daemon_send_descriptors(struct daemon *daemon, uint32_t type, uint64_t a, const int *fds, size_t count)
{
    return send_message(daemon, &(struct control){.type = type, .a = a}, NULL, 0, fds, count);
}
