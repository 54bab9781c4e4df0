/* READs that are passed on in parts. The caller holds the relay's lock. */
#pragma once

#include <stddef.h>

#include "kernel/protocol.h"
#include "relay/state.h"

/* One message to Python, if its socket takes it now. */
bool send_message(int python, const void *message, size_t length);
/* False: no memory, or too long. */
bool split_begin(struct relay *relay, uint32_t slot, const struct request *request);
/* Sends the parts that were not sent yet. False: not now. */
bool split_send(struct relay *relay, uint32_t slot, const struct request *request);
/* One part is answered. True: it was the last one, the kernel has its answer, and the slot is to be freed. */
bool split_answer(struct relay *relay, uint32_t slot, uint32_t part, const struct fuse_out_header *answer);
void split_drop(struct relay *relay, uint32_t slot);
