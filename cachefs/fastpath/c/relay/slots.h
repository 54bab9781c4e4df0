/* The slots of the shared memory: their states, their messages, and the owners that they count for. */
#pragma once

#include "kernel/protocol.h"
#include "relay/state.h"

void *slot_data(const struct relay *relay, uint32_t slot);
struct slot_head *head_of(const struct relay *relay, uint32_t slot);
enum slot_state state_of(const struct relay *relay, uint32_t slot);
/* Empties a slot, before it is read into. The slot belongs to the caller. */
void relay_ready_slot(struct relay *relay, uint32_t slot);
void relay_fill_slot(struct relay *relay, uint32_t slot, uint32_t length, uint64_t unique);
bool parse_slot(const struct relay *relay, uint32_t slot, struct request *request);
/* The unique that Python gets instead of the kernel's: of this generation of the slot, and of a part of its READ. */
uint64_t unique_of(const struct relay *relay, uint32_t slot, uint32_t part);
uint32_t owner_of(const struct relay *relay, uint32_t slot);

void set_state_locked(struct relay *relay, uint32_t slot, enum slot_state state) REQUIRES(relay_lock);
/* A new generation of the slot: answers to the old one find no request. */
void renew_locked(struct relay *relay, uint32_t slot, enum slot_state state) REQUIRES(relay_lock);
void count_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
/* Python has the request, or is about to get it. */
void count_passed_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
/* False: it did not count. */
bool uncount_locked(struct relay *relay, uint32_t slot) REQUIRES(relay_lock);
