#include "kernel/protocol.h"

#include <fcntl.h>
#include <string.h>

struct shape {
    uint16_t body;  /* bytes of the operation's struct */
    uint8_t names;  /* how many zero-terminated names follow it */
    uint8_t change; /* whether repeating it has another effect */
};

#define CHANGES 1
#define SETXATTR_BYTES 8 /* without the fields of FUSE_SETXATTR_EXT, which we do not negotiate */

static const struct shape shapes[] = {
    [FUSE_LOOKUP] = {0, 1, 0},
    [FUSE_FORGET] = {sizeof(struct fuse_forget_in), 0, 0},
    [FUSE_GETATTR] = {sizeof(struct fuse_getattr_in), 0, 0},
    [FUSE_SETATTR] = {sizeof(struct fuse_setattr_in), 0, 0},
    [FUSE_SYMLINK] = {0, 2, CHANGES},
    [FUSE_MKNOD] = {sizeof(struct fuse_mknod_in), 1, CHANGES},
    [FUSE_MKDIR] = {sizeof(struct fuse_mkdir_in), 1, CHANGES},
    [FUSE_UNLINK] = {0, 1, CHANGES},
    [FUSE_RMDIR] = {0, 1, CHANGES},
    [FUSE_RENAME] = {sizeof(struct fuse_rename_in), 2, CHANGES},
    [FUSE_LINK] = {sizeof(struct fuse_link_in), 1, CHANGES},
    [FUSE_OPEN] = {sizeof(struct fuse_open_in), 0, 0}, /* changes if it truncates; a handle dies with its Python */
    [FUSE_READ] = {sizeof(struct fuse_read_in), 0, 0},
    [FUSE_WRITE] = {sizeof(struct fuse_write_in), 0, 0}, /* at an offset that the kernel gives: it may be repeated */
    [FUSE_RELEASE] = {sizeof(struct fuse_release_in), 0, 0},
    [FUSE_FSYNC] = {sizeof(struct fuse_fsync_in), 0, 0},
    [FUSE_SETXATTR] = {SETXATTR_BYTES, 1, CHANGES},
    [FUSE_GETXATTR] = {sizeof(struct fuse_getxattr_in), 1, 0},
    [FUSE_LISTXATTR] = {sizeof(struct fuse_getxattr_in), 0, 0},
    [FUSE_REMOVEXATTR] = {0, 1, CHANGES},
    [FUSE_FLUSH] = {sizeof(struct fuse_flush_in), 0, 0},
    [FUSE_INIT] = {16, 0, 0},
    [FUSE_OPENDIR] = {sizeof(struct fuse_open_in), 0, 0},
    [FUSE_READDIR] = {sizeof(struct fuse_read_in), 0, 0},
    [FUSE_RELEASEDIR] = {sizeof(struct fuse_release_in), 0, 0},
    [FUSE_FSYNCDIR] = {sizeof(struct fuse_fsync_in), 0, 0},
    [FUSE_ACCESS] = {sizeof(struct fuse_access_in), 0, 0},
    [FUSE_CREATE] = {sizeof(struct fuse_create_in), 1, CHANGES},
    [FUSE_INTERRUPT] = {sizeof(struct fuse_interrupt_in), 0, 0},
    [FUSE_BATCH_FORGET] = {sizeof(struct fuse_batch_forget_in), 0, 0},
    [FUSE_FALLOCATE] = {sizeof(struct fuse_fallocate_in), 0, CHANGES},
    [FUSE_READDIRPLUS] = {sizeof(struct fuse_read_in), 0, 0},
    [FUSE_RENAME2] = {sizeof(struct fuse_rename2_in), 2, CHANGES},
    [FUSE_COPY_FILE_RANGE] = {sizeof(struct fuse_copy_file_range_in), 0, CHANGES},
};

static const struct shape *shape_of(uint32_t opcode)
{
    static const struct shape other = {0, 0, CHANGES}; /* unknown: Python answers ENOSYS; never sent twice */
    static const struct shape harmless = {0, 0, 0};
    if (opcode == FUSE_READLINK || opcode == FUSE_STATFS || opcode == FUSE_DESTROY ||
        opcode == FUSE_IOCTL || opcode == FUSE_LSEEK || opcode == FUSE_POLL)
        return &harmless;
    if (opcode >= sizeof shapes / sizeof *shapes)
        return &other;
    const struct shape *shape = &shapes[opcode];
    return shape->body || shape->names || shape->change ? shape : &other;
}

bool request_parse(void *message, size_t length, struct request *out)
{
    if (length < sizeof(struct fuse_in_header))
        return false;
    struct fuse_in_header *header = message;
    if (header->len != length)
        return false;
    const struct shape *shape = shape_of(header->opcode);
    char *at = (char *)(header + 1), *end = (char *)message + length;
    if ((size_t)(end - at) < shape->body)
        return false;
    *out = (struct request){.header = header, .body = at};
    at += shape->body;
    for (int i = 0; i < shape->names; i++) {
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
    return shape_of(request->header->opcode)->change;
}

bool request_overwrites(uint32_t opcode)
{
    return opcode == FUSE_WRITE || opcode == FUSE_SETATTR;
}

bool request_forgets(uint32_t opcode)
{
    return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET;
}

bool request_interruptible(uint32_t opcode)
{
    return opcode == FUSE_READ || opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS || opcode == FUSE_GETXATTR ||
           opcode == FUSE_LISTXATTR || opcode == FUSE_READLINK || opcode == FUSE_STATFS;
}
