#include "hits/listing.h"

#include <string.h>
#include <sys/stat.h>

#include "hits/attributes.h"

struct listing {
    uint8_t *out;
    size_t used, room;
    bool plus;
};

static bool list_entry(struct listing *listing, const char *name, size_t length, uint64_t position, uint64_t number,
                       uint32_t mode, const struct fuse_entry_out *entry)
{
    size_t head = listing->plus ? FUSE_NAME_OFFSET_DIRENTPLUS : FUSE_NAME_OFFSET;
    size_t size = FUSE_DIRENT_ALIGN(head + length);
    if (listing->used + size > listing->room)
        return false;
    uint8_t *at = listing->out + listing->used;
    if (listing->plus)
        memcpy(at, entry, sizeof *entry);
    struct fuse_dirent *dirent = (void *)(at + head - FUSE_NAME_OFFSET);
    dirent->ino = number;
    dirent->off = position;
    dirent->namelen = (uint32_t)length;
    dirent->type = mode >> 12;
    memcpy(dirent->name, name, length);
    memset(dirent->name + length, 0, size - head - length);
    listing->used += size;
    return true;
}

static uint64_t parent_of(struct worker *worker, uint64_t directory)
{
    struct scan scan;
    MDB_val key, value;
    if (directory != ROOT_INODE && scan_begin(&scan, &worker->view, LINKS, directory, NULL, 0) &&
        scan_next(&scan, &key, &value) && key.mv_size > 16)
        return second_number(&key);
    return ROOT_INODE;
}

enum outcome answer_listing(struct worker *worker, const struct request *request)
{
    const struct fuse_read_in *in = request->body;
    struct view *view = &worker->view;
    struct inode_record directory, record;
    uint64_t remaining, number = request->header->nodeid;
    if (!mounted_with(worker, PINS_EVERYTHING) || !valid_inode(worker, number, &directory) ||
        !(directory.flags & LISTED) || passes_names(worker))
        return PASS;
    struct listing listing = {
        .out = worker->scratch,
        .room = in->size < QUICK_BYTES ? in->size : QUICK_BYTES,
        .plus = request->header->opcode == FUSE_READDIRPLUS,
    };
    static const struct fuse_entry_out none; /* nodeid 0: the kernel takes the name alone */
    uint64_t after = in->offset;
    bool more = after >= 1 || list_entry(&listing, ".", 1, 1, number, S_IFDIR, &none);
    more = more && (after >= 2 || list_entry(&listing, "..", 2, 2, parent_of(worker, number), S_IFDIR, &none));
    uint64_t start[2] = {big_endian(number), big_endian(after < 2 ? FIRST_POSITION : after + 1)};
    struct scan scan;
    MDB_val key, value;
    if (!scan_begin(&scan, view, LISTING, number, start, sizeof start))
        return PASS;
    while (more && scan_next(&scan, &key, &value)) {
        struct dentry_record dentry;
        struct fuse_entry_out entry;
        if (key.mv_size != 16 || value.mv_size < 4)
            return PASS;
        uint64_t position = second_number(&key);
        const char *name = (char *)value.mv_data + 4;
        size_t length = value.mv_size - 4;
        if (!view_dentry(view, number, name, length, &dentry) || !entry_holds(view, &directory, &dentry) ||
            !(remaining = valid_inode(worker, dentry.inode, &record))) {
            if (!listing.used)
                return PASS;
            break; /* the entries so far are an answer; the kernel asks for the rest again, and that is passed on */
        }
        if (dentry.position && dentry.position != position)
            continue; /* the name is listed elsewhere */
        fill_entry(&entry, dentry.inode, &record, remaining);
        more = list_entry(&listing, name, length, position, dentry.inode, record.mode, &entry);
    }
    if (view->damaged) /* the listing may go on */
        return PASS;
    view_end(view);
    return answer(worker, request, 0, listing.out, listing.used);
}
