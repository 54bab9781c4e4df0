#include "cache/speculative_read.h"

#define STREAK 8

void speculative_read_lookup(struct speculative_read *speculation, uint64_t inode)
{
    if (speculation->looked_up)
        speculation->streak = 0;
    speculation->looked_up = inode;
}

const void *speculative_read_data(struct speculative_read *speculation, uint64_t inode, const struct extent *extent,
                                  uint32_t length)
{
    if (speculation->looked_up == inode) {
        speculation->looked_up = 0;
        speculation->streak++;
    }
    bool same = speculation->inode == inode && speculation->extent.version == extent->record.version &&
                speculation->extent.blob_offset == extent->record.blob_offset && length <= speculation->extent.length;
    return same ? speculation->data : NULL;
}

bool speculative_read_next(struct speculative_read *speculation, struct view *view, const struct blob *blob)
{
    struct inode_record record;
    struct extent extent;
    uint64_t inode = speculation->looked_up;
    if (!inode || inode == speculation->inode || speculation->streak < STREAK || view_begin(view))
        return false;
    speculation->inode = 0;
    if (view_inode(view, inode, &record) && record.size <= QUICK_READ_BYTES && view_extent(view, inode, 0, &extent) &&
        extent.record.version == record.version && extent.record.length == record.size &&
        (speculation->data = blob_read(blob, &extent, 0, extent.record.length, speculation->scratch))) {
        speculation->inode = inode;
        speculation->extent = extent.record;
    }
    view_end(view);
    return speculation->inode;
}
