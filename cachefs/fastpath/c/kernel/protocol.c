#include "kernel/protocol.h"

#include <fcntl.h>
#include <string.h>

struct shape {
    uint16_t body;  /* bytes of the operation's struct */
    uint8_t names;  /* how many zero-terminated names follow it */
    uint8_t kind;   /* enum request_kind */
};

/* The table is in cachefs/contract/fuse.py, which the daemon uses, too. Checked here: it agrees with linux/fuse.h. */
#define SHAPE(operation, number, body, names, kind) [number] = {body, names, kind},
#define CHECK_NUMBER(operation, number, body, names, kind) static_assert(operation == number, #operation);
#define CHECK_SIZE(name, bytes) static_assert(sizeof(struct name) == bytes, #name);

static const struct shape shapes[] = {FUSE_OPERATIONS(SHAPE)};
FUSE_OPERATIONS(CHECK_NUMBER)
FUSE_STRUCTS(CHECK_SIZE)

/* Of an unknown opcode, zeros: Python answers ENOSYS, and it is never repeated. */
static struct shape shape_of(uint32_t opcode)
{
    return opcode < sizeof shapes / sizeof *shapes ? shapes[opcode] : (struct shape){0};
}

bool request_parse(void *message, size_t length, struct request *out)
{
    struct fuse_in_header *header = message;
    if (length < sizeof *header || header->len != length)
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
    if (header->opcode == FUSE_BATCH_FORGET)
        return ((const struct fuse_batch_forget_in *)out->body)->count <= (size_t)(end - at) / sizeof(struct fuse_forget_one);
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
