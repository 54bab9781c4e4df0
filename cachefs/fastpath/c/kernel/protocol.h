/* The FUSE protocol: what a message must look like before anything believes it. */
#pragma once

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

/* Checks lengths and terminators. False: not a message that a kernel sends; it is passed on to nobody. */
bool request_parse(void *message, size_t length, struct request *out);

/* Would doing it twice be seen? Such a request is never passed on again. */
bool request_changes(const struct request *request);

/* Sets what it finds: doing it twice is doing it once, unless another request came in between. */
bool request_overwrites(uint32_t opcode);

/* Has no answer. Python counts it: twice is once too often. */
bool request_forgets(uint32_t opcode);

/* Has nothing to be undone if its caller stops waiting. */
bool request_interruptible(uint32_t opcode);
