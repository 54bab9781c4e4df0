/* What the fast path answers, and from what: the table in docs/FASTPATH.md. */
#ifndef CACHEFS_ANSWER_H
#define CACHEFS_ANSWER_H

#include "serve.h"

enum outcome answer_request(struct worker *worker, const struct request *request);

/* Listings and READs have files of their own. */
enum outcome answer_listing(struct worker *worker, const struct request *request);
/* AGAIN: the index has changed meanwhile. */
enum outcome answer_read(struct worker *worker, const struct request *request);
void answer(struct worker *worker, const struct request *request, int error, const void *data, size_t length);
bool mounted_with(const struct worker *worker, uint32_t flag);
/* A record that may be believed without asking the source, and for how long. */
bool believed(struct worker *worker, uint64_t inode, struct inode_record *record, uint64_t *remaining);
void fill_entry(struct fuse_entry_out *out, uint64_t number, const struct inode_record *record, uint64_t timeout_ns);

#endif
