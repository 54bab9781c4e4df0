/* Answers on their way to the kernel. What it does not take is answered EIO; ENOENT is fine: the caller was interrupted, or a
 * predecessor has answered. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct fuse_out_header;

#define MAX_REPLY_PARTS 8
/* Answers the kernel with data that lies in pieces. */
void reply_parts(int device, uint64_t unique, const struct iovec *parts, int count);
/* Answers the kernel. `error`: 0 or an errno. */
void reply(int device, uint64_t unique, int error, const void *data, size_t length);
/* A whole message as somebody else wrote it, but for its unique. */
void reply_message(int device, const struct fuse_out_header *message, size_t length);
