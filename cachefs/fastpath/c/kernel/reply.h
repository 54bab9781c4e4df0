/* Answers to the kernel. If it refuses one, the request is answered EIO. ENOENT is no error: the caller was interrupted, or a
 * predecessor has answered. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct fuse_out_header;

#define MAX_REPLY_PARTS 8
/* Answers with data in several pieces. */
void reply_parts(int device, uint64_t unique, const struct iovec *parts, int count);
/* `error`: 0 or an errno; then the answer has no data. */
void reply(int device, uint64_t unique, int error, const void *data, size_t length);
/* A whole message of Python's, with the kernel's unique. */
void reply_message(int device, const struct fuse_out_header *message, size_t length);
