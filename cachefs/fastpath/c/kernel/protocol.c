#include "kernel/protocol.h"

#include <fcntl.h>
#include <string.h>

struct shape {
    uint16_t body;  /* bytes of the operation's struct */
    uint8_t names;  /* how many zero-terminated names follow it */
    uint8_t kind;   /* enum request_kind */
};

#define SETXATTR_BYTES 8 /* without the fields of FUSE_SETXATTR_EXT, which we do not negotiate */

static const struct shape shapes[] = {
    [FUSE_LOOKUP] = {0, 1, REPEATABLE},
    [FUSE_FORGET] = {sizeof(struct fuse_forget_in), 0, REPEATABLE | FORGETS},
    [FUSE_GETATTR] = {sizeof(struct fuse_getattr_in), 0, REPEATABLE},
    [FUSE_SETATTR] = {sizeof(struct fuse_setattr_in), 0, REPEATABLE | OVERWRITES},
    [FUSE_READLINK] = {0, 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_SYMLINK] = {0, 2, 0},
    [FUSE_MKNOD] = {sizeof(struct fuse_mknod_in), 1, 0},
    [FUSE_MKDIR] = {sizeof(struct fuse_mkdir_in), 1, 0},
    [FUSE_UNLINK] = {0, 1, 0},
    [FUSE_RMDIR] = {0, 1, 0},
    [FUSE_RENAME] = {sizeof(struct fuse_rename_in), 2, 0},
    [FUSE_LINK] = {sizeof(struct fuse_link_in), 1, 0},
    [FUSE_OPEN] = {sizeof(struct fuse_open_in), 0, REPEATABLE}, /* but see request_changes; a handle dies with its Python */
    [FUSE_READ] = {sizeof(struct fuse_read_in), 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_WRITE] = {sizeof(struct fuse_write_in), 0, REPEATABLE | OVERWRITES}, /* its offset is given */
    [FUSE_STATFS] = {0, 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_RELEASE] = {sizeof(struct fuse_release_in), 0, REPEATABLE},
    [FUSE_FSYNC] = {sizeof(struct fuse_fsync_in), 0, REPEATABLE},
    [FUSE_SETXATTR] = {SETXATTR_BYTES, 1, 0},
    [FUSE_GETXATTR] = {sizeof(struct fuse_getxattr_in), 1, REPEATABLE | INTERRUPTIBLE},
    [FUSE_LISTXATTR] = {sizeof(struct fuse_getxattr_in), 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_REMOVEXATTR] = {0, 1, 0},
    [FUSE_FLUSH] = {sizeof(struct fuse_flush_in), 0, REPEATABLE},
    [FUSE_INIT] = {16, 0, REPEATABLE},
    [FUSE_OPENDIR] = {sizeof(struct fuse_open_in), 0, REPEATABLE},
    [FUSE_READDIR] = {sizeof(struct fuse_read_in), 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_RELEASEDIR] = {sizeof(struct fuse_release_in), 0, REPEATABLE},
    [FUSE_FSYNCDIR] = {sizeof(struct fuse_fsync_in), 0, REPEATABLE},
    [FUSE_ACCESS] = {sizeof(struct fuse_access_in), 0, REPEATABLE},
    [FUSE_CREATE] = {sizeof(struct fuse_create_in), 1, 0},
    [FUSE_INTERRUPT] = {sizeof(struct fuse_interrupt_in), 0, REPEATABLE},
    [FUSE_BATCH_FORGET] = {sizeof(struct fuse_batch_forget_in), 0, REPEATABLE | FORGETS},
    [FUSE_DESTROY] = {0, 0, REPEATABLE},
    [FUSE_IOCTL] = {0, 0, REPEATABLE},
    [FUSE_POLL] = {0, 0, REPEATABLE},
    [FUSE_FALLOCATE] = {sizeof(struct fuse_fallocate_in), 0, 0},
    [FUSE_READDIRPLUS] = {sizeof(struct fuse_read_in), 0, REPEATABLE | INTERRUPTIBLE},
    [FUSE_LSEEK] = {0, 0, REPEATABLE},
    [FUSE_RENAME2] = {sizeof(struct fuse_rename2_in), 2, 0},
    [FUSE_COPY_FILE_RANGE] = {sizeof(struct fuse_copy_file_range_in), 0, 0},
};

/* Of an unknown opcode, zeros: Python answers ENOSYS, and it is never repeated. */
static struct shape shape_of(uint32_t opcode)
{
    return opcode < sizeof shapes / sizeof *shapes ? shapes[opcode] : (struct shape){0};
}

bool request_parse(void *message, size_t length, struct request *out)
{
    if (length < sizeof(struct fuse_in_header))
        return false;
    struct fuse_in_header *header = message;
    if (header->len != length)
        return false;
    struct shape shape = shape_of(header->opcode);
    char *at = (char *)(header + 1), *end = (char *)message + length;
    if ((size_t)(end - at) < shape.body)
        return false;
    *out = (struct request){.header = header, .body = at};
    at += shape.body;
    for (int i = 0; i < shape.names; i++) {
        char *zero = memchr(at, 0, (size_t)(end - at));
        if (!zero)
            return false;
        if (i == 0) {
            out->name = at;
            out->name_length = (size_t)(zero - at);
        } else {
            out->new_name = at;
        }
        at = zero + 1;
    }
    if (header->opcode == FUSE_BATCH_FORGET) {
        const struct fuse_batch_forget_in *batch = out->body;
        return batch->count <= (size_t)(end - at) / sizeof(struct fuse_forget_one);
    }
    if (header->opcode == FUSE_WRITE)
        return ((const struct fuse_write_in *)out->body)->size <= (size_t)(end - at);
    return true;
}

bool request_changes(const struct request *request)
{
    if (request->header->opcode == FUSE_OPEN)
        return ((const struct fuse_open_in *)request->body)->flags & O_TRUNC;
    return !request_is(request->header->opcode, REPEATABLE);
}

bool request_is(uint32_t opcode, enum request_kind kind)
{
    return shape_of(opcode).kind & kind;
}
