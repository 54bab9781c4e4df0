/* The slots of the shared memory: their states, their messages, and whose they count as. */
#pragma once

#include "kernel/protocol.h"
#include "relay/state.h"

void *slot_data(const struct relay *relay, uint32_t slot);
struct slot_head *head_of(const struct relay *relay, uint32_t slot);
/* Marks a thread's own slot as empty, before it reads. */
void relay_ready_slot(struct relay *relay, uint32_t slot);
void relay_fill_slot(struct relay *relay, uint32_t slot, uint32_t length, uint64_t unique);

/* The caller holds the lock for these. */
enum slot_state state_of(const struct relay *relay, uint32_t slot);
void set_state(struct relay *relay, uint32_t slot, enum slot_state state);
/* A new life of the slot: answers to the old one find no request. */
void renew(struct relay *relay, uint32_t slot, enum slot_state state);
bool parse_slot(const struct relay *relay, uint32_t slot, struct request *request);
/* What Python is told instead of the kernel's unique: of this life of the slot, and of a part of its READ. */
uint64_t unique_of(const struct relay *relay, uint32_t slot, uint32_t part);
uint32_t owner_of(const struct relay *relay, uint32_t slot);
void count_locked(struct relay *relay, uint32_t slot);
/* It is Python's, or will be. */
void count_passed_locked(struct relay *relay, uint32_t slot);
void uncount_locked(struct relay *relay, uint32_t slot);
