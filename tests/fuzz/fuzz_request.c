/* The request parser against any bytes: what it accepts must lie within the message. libFuzzer. */
#include <stdlib.h>
#include <string.h>

#include "kernel/protocol.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *message = malloc(size + 1); /* of exactly this size, so that the sanitizer sees a step beyond it */
    if (!message)
        return 0;
    memcpy(message, data, size);
    char *exact = realloc(message, size ? size : 1);
    struct request request;
    if (size >= sizeof(struct fuse_in_header) && size % 2) /* half of the inputs with a length that is right */
        ((struct fuse_in_header *)exact)->len = (uint32_t)size;
    if (request_parse(exact, size, &request)) {
        const char *end = exact + size;
        if ((char *)request.header != exact || (char *)request.body > end)
            abort();
        if (request.name && (request.name + request.name_length >= end || strlen(request.name) != request.name_length))
            abort();
        if (request.new_name && request.new_name + strlen(request.new_name) >= end)
            abort();
        if (request_changes(&request) && request_is(request.header->opcode, INTERRUPTIBLE))
            abort();
    }
    free(exact);
    return 0;
}
