#include "relay/split.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/assertion.h"
#include "kernel/reply.h"
#include "relay/slots.h"

struct split { /* a READ that was passed on in parts */
    uint32_t size, count, sent, done;
    int error;
    uint32_t lengths[MAX_PARTS];
    uint8_t data[];
};

bool send_message(int python, const void *message, size_t length)
{
    return send(python, message, length, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)length;
}

bool split_begin_locked(struct relay *relay, uint32_t slot, const struct request *request)
{
    uint32_t size = ((const struct fuse_read_in *)request->body)->size;
    if (size > MAX_PARTS * PART_BYTES)
        return false;
    if (!relay->splits[slot])
        relay->splits[slot] = calloc(1, sizeof(struct split) + size);
    if (!relay->splits[slot])
        return false;
    relay->splits[slot]->size = size;
    relay->splits[slot]->count = head_of(relay, slot)->parts = (size + PART_BYTES - 1) / PART_BYTES;
    return true;
}

bool split_send_locked(struct relay *relay, uint32_t slot, const struct request *request)
{
    struct split *split = relay->splits[slot];
    const struct fuse_read_in *whole = request->body;
    ASSERT(split && split->count <= MAX_PARTS && split->sent <= split->count);
    while (split->sent < split->count) {
        struct {
            struct fuse_in_header header;
            struct fuse_read_in read;
        } message = {*request->header, *whole};
        uint32_t from = split->sent * PART_BYTES, rest = whole->size - from;
        message.header.unique = unique_of(relay, slot, split->sent);
        message.header.len = sizeof message;
        message.read.offset = whole->offset + from;
        message.read.size = rest < PART_BYTES ? rest : PART_BYTES;
        if (!send_message(relay->python, &message, sizeof message))
            return false;
        split->sent++;
    }
    return true;
}

bool split_answer_locked(struct relay *relay, uint32_t slot, uint32_t part, const struct fuse_out_header *answer)
{
    struct split *split = relay->splits[slot];
    uint32_t length = answer->len - (uint32_t)sizeof *answer;
    if (!split || part >= split->count || split->done == split->count)
        return false;
    uint32_t rest = split->size - part * PART_BYTES, most = rest < PART_BYTES ? rest : PART_BYTES;
    if (answer->error || length > most) {
        split->error = answer->error ? -answer->error : EIO;
        length = 0;
    }
    memcpy(split->data + (size_t)part * PART_BYTES, answer + 1, length);
    split->lengths[part] = length;
    if (++split->done < split->count)
        return false;
    size_t total = 0;
    for (uint32_t i = 0; i < split->count; i++) { /* up to the first short part: the file ends there */
        total += split->lengths[i];
        if (split->lengths[i] < PART_BYTES)
            break;
    }
    if (state_of(relay, slot) == SLOT_PASSED)
        reply(relay->device, head_of(relay, slot)->unique, split->error, split->data, total);
    return true;
}

void split_drop_locked(struct relay *relay, uint32_t slot)
{
    free(relay->splits[slot]);
    relay->splits[slot] = NULL;
}
