#include "kernel/protocol.h"

#include "common/contract.h"

#include <fcntl.h>
#include <string.h>

struct shape {
    uint16_t body;  /* bytes of the operation's struct */
    uint8_t names;  /* how many zero-terminated names follow it */
    uint8_t change; /* whether doing it twice would be seen */
    uint8_t known;
};

/* The table is in cachefs/contract/fuse.py, which the daemon uses, too. Checked here: it agrees with linux/fuse.h. */
#define SHAPE(operation, number, body, names, changes) [number] = {body, names, changes, 1},
#define CHECK_NUMBER(operation, number, body, names, changes) static_assert(operation == number, #operation);
#define CHECK_SIZE(name, bytes) static_assert(sizeof(struct name) == bytes, #name);

static const struct shape shapes[] = {FUSE_OPERATIONS(SHAPE)};
FUSE_OPERATIONS(CHECK_NUMBER)
FUSE_STRUCTS(CHECK_SIZE)

static const struct shape *shape_of(uint32_t opcode)
{
    static const struct shape other = {0, 0, 1, 0}; /* Python answers ENOSYS; never sent twice */
    return opcode < sizeof shapes / sizeof *shapes && shapes[opcode].known ? &shapes[opcode] : &other;
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
    return opcode == FUSE_READ || opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS || opcode == FUSE_GETXATTR || opcode == FUSE_LISTXATTR ||
           opcode == FUSE_READLINK || opcode == FUSE_STATFS;
}
