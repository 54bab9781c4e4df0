/* READs that are passed on in parts. */
#pragma once

#include "kernel/protocol.h"
#include "relay/state.h"

/* Sends one message to Python, if its socket takes it now. */
bool send_message(int python, const void *message, size_t length);
/* False: no memory, or the READ is too long. */
bool split_begin_locked(struct relay *relay, uint32_t slot, const struct request *request) REQUIRES(relay_lock);
/* Sends the parts that were not sent yet. False: not now. */
bool split_send_locked(struct relay *relay, uint32_t slot, const struct request *request) REQUIRES(relay_lock);
/* One part is answered. True: it was the last one, the kernel has its answer, and the slot is to be freed. */
bool split_answer_locked(struct relay *relay, uint32_t slot, uint32_t part, const struct fuse_out_header *answer)
    REQUIRES(relay_lock);
void split_drop_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
