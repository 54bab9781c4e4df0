/* The attributes and time-outs that the kernel gets of an inode that is valid in the index. */
#pragma once

#include "worker/worker.h"

/* The record of an inode that is valid without asking the source. Returns for how long it is valid; 0: it is not. */
uint64_t valid_inode(struct worker *worker, uint64_t inode, struct inode_record *record);
void fill_attributes(struct fuse_attr *out, uint64_t number, const struct inode_record *record);
void fill_entry(struct fuse_entry_out *out, uint64_t number, const struct inode_record *record, uint64_t timeout_ns);
void split_timeout(uint64_t ns, uint64_t *seconds, uint32_t *rest);
/* Must Python answer whatever may lead to names? It does for a while after permissions have changed (permissions.py). */
bool passes_names(const struct worker *worker);
/* Must Python answer each OPEN? It does for a while after another node has changed the mode of a file (validity.py). */
bool passes_opens(const struct worker *worker);
