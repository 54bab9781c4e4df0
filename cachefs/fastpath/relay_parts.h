/* What the files of the relay share. The caller holds its lock. */
#ifndef CACHEFS_RELAY_PARTS_H
#define CACHEFS_RELAY_PARTS_H

#include "relay.h"

/* --- slots: relay_slots.c --- */

struct slot_head *head_of(const struct relay *relay, uint32_t slot);
enum slot_state state_of(const struct relay *relay, uint32_t slot);
void set_state(struct relay *relay, uint32_t slot, enum slot_state state);
/* A new life of the slot: answers to the old one find nobody. */
void renew(struct relay *relay, uint32_t slot, enum slot_state state);
void free_locked(struct relay *relay, uint32_t slot);
void fail_locked(struct relay *relay, uint32_t slot, int error);
bool parse_slot(const struct relay *relay, uint32_t slot, struct request *request);
/* What Python is told instead of the kernel's unique: of this life of the slot, and of a part of its READ. */
uint64_t unique_of(const struct relay *relay, uint32_t slot, uint32_t part);

/* --- shares of slots, and requests that wait for one: relay_lot.c --- */

void count_locked(struct relay *relay, uint32_t slot);
/* It is Python's, or will be. */
void count_passed_locked(struct relay *relay, uint32_t slot);
void uncount_locked(struct relay *relay, uint32_t slot);
bool claim_locked(struct relay *relay, uint32_t slot);
void add_work_locked(struct relay *relay, uint32_t slot);
/* Takes the request out of a slot whose owner has too many, or refuses it. The slot is empty then. */
void park_locked(struct relay *relay, uint32_t slot);
/* Slots have become free. */
void unpark_locked(struct relay *relay);
/* After the slots were looked through. False: no memory. */
bool lot_init(struct relay *relay);
bool interrupt_parked_locked(struct relay *relay, uint64_t unique);

/* --- READs that are passed on in parts: relay_split.c --- */

/* False: no memory, or too long. */
bool split_begin(struct relay *relay, uint32_t slot, const struct request *request);
/* Sends the parts that were not sent yet. False: not now. */
bool split_send(struct relay *relay, uint32_t slot, const struct request *request);
/* One part is answered. The last one answers the kernel. */
void split_answer(struct relay *relay, uint32_t slot, uint32_t part, const struct fuse_out_header *answer);
void split_drop(struct relay *relay, uint32_t slot);

bool send_message(int python, const void *message, size_t length);

#endif
