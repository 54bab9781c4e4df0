#include "kernel/reply.h"

#include <errno.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <unistd.h>

#include "common/assertion.h"
#include "kernel/complaint.h"

/* ENOENT: the caller was interrupted, or a predecessor has answered. */
static bool refused(ssize_t written)
{
    return written < 0 && errno != ENOENT && errno != ENODEV;
}

void reply_parts(int device, uint64_t unique, const struct iovec *parts, int count)
{
    ASSERT(count <= MAX_REPLY_PARTS);
    struct fuse_out_header header = {.len = sizeof header, .unique = unique};
    struct iovec all[1 + MAX_REPLY_PARTS] = {{&header, sizeof header}};
    for (int i = 0; i < count; i++) {
        all[1 + i] = parts[i];
        header.len += (uint32_t)parts[i].iov_len;
    }
    if (refused(writev(device, all, 1 + count)))
        reply(device, unique, EIO, NULL, 0);
}

void reply(int device, uint64_t unique, int error, const void *data, size_t length)
{
    if (!error) {
        reply_parts(device, unique, &(struct iovec){(void *)data, length}, length ? 1 : 0);
        return;
    }
    struct fuse_out_header header = {.len = sizeof header, .error = -error, .unique = unique};
    if (refused(write(device, &header, sizeof header)))
        complain("cannot answer the kernel");
}

void reply_message(int device, const struct fuse_out_header *message, size_t length)
{
    if (refused(write(device, message, length)))
        reply(device, message->unique, EIO, NULL, 0);
}
