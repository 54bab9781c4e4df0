#include "hits/attributes.h"

#include <sys/stat.h>

#include "common/clock.h"

#define SECOND_NS 1000000000

static void split_time(int64_t ns, uint64_t *seconds, uint32_t *rest)
{
    int64_t floor = ns / SECOND_NS - (ns % SECOND_NS < 0);
    *seconds = (uint64_t)floor;
    *rest = (uint32_t)(ns - floor * SECOND_NS);
}

/* A source may report no blocks until it has allocated them, and then no time changes (ZFS, Lustre). Archivers skip the data of
 * a file without blocks (hazard 43), so a file with a size has at least one. Inode.allocated_blocks in Python is the same. */
static uint64_t allocated_blocks(const struct inode_record *record)
{
    return !record->blocks && record->size && S_ISREG(record->mode) ? 1 : record->blocks;
}

void fill_attributes(struct fuse_attr *out, uint64_t number, const struct inode_record *record)
{
    *out = (struct fuse_attr){
        .ino = number,
        .size = record->size,
        .blocks = allocated_blocks(record),
        .mode = record->mode,
        .nlink = record->nlink,
        .uid = record->uid,
        .gid = record->gid,
        .rdev = record->rdev,
        .blksize = record->blksize,
    };
    split_time(record->atime_ns, &out->atime, &out->atimensec);
    split_time(record->mtime_ns, &out->mtime, &out->mtimensec);
    split_time(record->ctime_ns, &out->ctime, &out->ctimensec);
}

void split_timeout(uint64_t ns, uint64_t *seconds, uint32_t *rest)
{
    *seconds = ns == FOREVER ? UINT64_MAX : ns / SECOND_NS;
    *rest = ns == FOREVER ? 0 : (uint32_t)(ns % SECOND_NS);
}

void fill_entry(struct fuse_entry_out *out, uint64_t number, const struct inode_record *record, uint64_t timeout_ns)
{
    *out = (struct fuse_entry_out){.nodeid = number};
    fill_attributes(&out->attr, number, record);
    split_timeout(timeout_ns, &out->entry_valid, &out->entry_valid_nsec);
    out->attr_valid = out->entry_valid;
    out->attr_valid_nsec = out->entry_valid_nsec;
}

uint64_t valid_inode(struct worker *worker, uint64_t inode, struct inode_record *record)
{
    bool usable = view_inode(&worker->view, inode, record) && is_pinned(&worker->view, record);
    return usable ? remaining_ns(&worker->view, record) : 0;
}

static bool lies_ahead(uint64_t until)
{
    return until && monotonic_ns() < until;
}

bool passes_names(const struct worker *worker)
{
    return lies_ahead(worker->fastpath->shared->pass_names_until_ns);
}

bool passes_opens(const struct worker *worker)
{
    return lies_ahead(worker->fastpath->shared->pass_opens_until_ns);
}
