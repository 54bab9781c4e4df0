/* The FUSE protocol: messages are checked before anything uses them. */
#pragma once

#include "common/contract.h"

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct request {
    struct fuse_in_header *header;
    void *body;           /* the struct of the operation, at least as long as it must be */
    const char *name;     /* zero-terminated, or NULL where the operation has none */
    const char *new_name; /* RENAME, RENAME2 */
    size_t name_length;
};

/* Checks lengths and terminators. False: no kernel sends this message; it is answered with an error. */
bool request_parse(void *message, size_t length, struct request *out);

/* Does repeating it have another effect than doing it once? Such a request is never passed on again. */
bool request_changes(const struct request *request);

bool request_is(uint32_t opcode, enum request_kind kind);
