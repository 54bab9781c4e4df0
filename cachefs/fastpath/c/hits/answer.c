#include "hits/answer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "hits/attributes.h"
#include "hits/listing.h"
#include "hits/reading.h"
#include "relay/passing.h"
#include "relay/relay.h"

#define MAX_READAHEAD (1u << 20)
#define MAX_WRITE (128u << 10)
#define MAX_BACKGROUND 1024 /* READs of one user that wait for the source must not delay those of other users in the kernel */
#define CONGESTION 48
#define OPEN_NOFLUSH (1u << 5) /* FOPEN_NOFLUSH, Linux 5.18 */

/* The flags that libfuse would ask for, and those that only we need (hazards 3 and 18). DONT_MASK: modes arrive unmasked, next
 * to the caller's umask, which Python applies at the source (credentials.py). HANDLE_KILLPRIV_V2: set-user-ID bits and
 * capabilities of files are cleared by the source, because Python writes as the caller; so the kernel need not ask for
 * security.capability before each write (hazard 29). */
#define INIT_FLAGS                                                                                        \
    (FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC | FUSE_BIG_WRITES | FUSE_DO_READDIRPLUS | FUSE_ASYNC_DIO |     \
     FUSE_PARALLEL_DIROPS | FUSE_HANDLE_KILLPRIV | FUSE_HANDLE_KILLPRIV_V2 | FUSE_POSIX_ACL |             \
     FUSE_MAX_PAGES | FUSE_CACHE_SYMLINKS | FUSE_DONT_MASK)

/* --- names and attributes ------------------------------------------------------------------------------------------- */

static enum outcome serve_lookup(struct worker *worker, const struct request *request)
{
    struct view *view = &worker->view;
    struct inode_record parent, record;
    struct dentry_record dentry;
    struct fuse_entry_out out = {0};
    if (passes_names(worker))
        return PASS;
    uint64_t remaining = valid_inode(worker, request->header->nodeid, &parent);
    if (!remaining || request->name_length > MAX_NAME_BYTES) /* Python answers ENAMETOOLONG */
        return PASS;
    if (!view_dentry(view, request->header->nodeid, request->name, request->name_length, &dentry) || view->damaged)
        return PASS; /* a listing does not prove that a name does not exist */
    if (knows_absent(view, &parent, &dentry)) {
        split_timeout(remaining, &out.entry_valid, &out.entry_valid_nsec);
    } else if (dentry.inode && entry_holds(view, &parent, &dentry) &&
               (remaining = valid_inode(worker, dentry.inode, &record))) {
        fill_entry(&out, dentry.inode, &record, remaining);
    } else {
        return PASS;
    }
    view_end(view);
    if (worker->is_leader && out.nodeid && S_ISREG(record.mode)) {
        assert_leader(worker);
        speculative_read_lookup(&worker->fastpath->speculative_read, out.nodeid);
    }
    return answer(worker, request, 0, &out, sizeof out);
}

static enum outcome serve_getattr(struct worker *worker, const struct request *request)
{
    struct inode_record record;
    struct fuse_attr_out out = {0};
    uint64_t remaining = valid_inode(worker, request->header->nodeid, &record);
    if (!remaining)
        return PASS;
    view_end(&worker->view);
    fill_attributes(&out.attr, request->header->nodeid, &record);
    split_timeout(remaining, &out.attr_valid, &out.attr_valid_nsec);
    return answer(worker, request, 0, &out, sizeof out);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

/* A symlink's target or an xattr, if it is of the version of the inode's record. */
static bool value_of(struct worker *worker, enum table table, const struct request *request, MDB_val *out)
{
    struct inode_record record;
    uint64_t version, inode = request->header->nodeid;
    if (!valid_inode(worker, inode, &record) ||
        !view_get_named(&worker->view, table, inode, request->name, request->name_length, out) || out->mv_size < 16)
        return false;
    memcpy(&version, (char *)out->mv_data + 8, sizeof version);
    *out = (MDB_val){out->mv_size - 16, (char *)out->mv_data + 16};
    if (out->mv_size > QUICK_BYTES)
        return false;
    /* Copied out of the index's pages: if this process is killed in a page fault while the kernel copies an answer, the caller
     * gets EIO. */
    out->mv_data = memcpy(worker->scratch, out->mv_data, out->mv_size);
    view_end(&worker->view);
    return version == record.version;
}

static enum outcome serve_readlink(struct worker *worker, const struct request *request)
{
    MDB_val target;
    return value_of(worker, SYMLINKS, request, &target) ? answer(worker, request, 0, target.mv_data, target.mv_size) : PASS;
}

static enum outcome serve_xattr(struct worker *worker, const struct request *request)
{
    const struct fuse_getxattr_in *in = request->body;
    MDB_val value;
    if (passes_names(worker)) /* the kernel may combine an ACL with a former mode (hazard 78) */
        return PASS;
    if (!value_of(worker, XATTRS, request, &value) || !value.mv_size)
        return PASS;
    const char *bytes = value.mv_data;
    size_t length = value.mv_size - 1;
    if (!bytes[0])
        return answer(worker, request, ENODATA, NULL, 0);
    if (request->header->opcode == FUSE_LISTXATTR && length)
        return PASS; /* the index separates the names by zeros, the reply ends each with one: rare, so Python answers */
    if (!in->size)
        return answer(worker, request, 0, &(struct fuse_getxattr_out){.size = (uint32_t)length}, sizeof(struct fuse_getxattr_out));
    if (in->size < length)
        return answer(worker, request, ERANGE, NULL, 0);
    return answer(worker, request, 0, bytes + 1, length);
}

/* --- handles ------------------------------------------------------------------------------------------------------ */

static bool opens_for_reading(const struct fuse_open_in *in)
{
    return (in->flags & O_ACCMODE) == O_RDONLY && !(in->flags & O_TRUNC);
}

static enum outcome serve_open(struct worker *worker, const struct request *request)
{
    struct fuse_open_in *in = request->body;
    struct inode_record record;
    uint64_t unique = request->header->unique;
    struct fuse_open_out out = {
        .fh = FAST_HANDLE | request->header->nodeid,
        .open_flags = FOPEN_KEEP_CACHE | OPEN_NOFLUSH,
    };
    if (mounted_with(worker, NO_OPEN))
        return answer(worker, request, ENOSYS, NULL, 0); /* the kernel never asks again */
    if (passes_opens(worker) || !view_inode(&worker->view, request->header->nodeid, &record))
        return PASS;
    if ((record.flags & YOUNG) || is_immutable_on_open(&record)) /* while it was mutable, pages were another version's */
        out.open_flags &= ~(uint32_t)FOPEN_KEEP_CACHE;
    if (opens_for_reading(in) && is_immutable_on_open(&record) && remaining_ns(&worker->view, &record)) {
        /* Python gets the request before the kernel has our answer: a later open for writing arrives behind it, and is
         * refused. Python answers too, in case this process is killed in between. */
        view_end(&worker->view);
        if (!relay_claim_passed(&worker->fastpath->relay, worker->slot))
            return PASS; /* the request waits for its owner's share, and is served again */
        in->flags = OPEN_REPORT | OPEN_HAS_VERSION | (uint32_t)(record.version & OPEN_VERSION_MASK) << OPEN_VERSION_BIT;
        worker->counters->answered++;
        relay_pass(&worker->fastpath->relay, worker->slot);
        reply(worker->fastpath->device, unique, 0, &out, sizeof out);
        return TAKEN;
    }
    if (!opens_for_reading(in) || !remaining_ns(&worker->view, &record) || !is_immutable(&worker->view, &record))
        return PASS;
    return record.flags & UNLINKED ? PASS : answer(worker, request, 0, &out, sizeof out);
}

static enum outcome serve_opendir(struct worker *worker, const struct request *request)
{
    struct fuse_open_out out = {.fh = FAST_HANDLE | request->header->nodeid};
    return answer(worker, request, mounted_with(worker, NO_OPEN) ? ENOSYS : 0, &out, sizeof out);
}

/* --- the rest ----------------------------------------------------------------------------------------------------- */

/* Look-ups of pinned inodes are not counted. Python needs the FORGETs of all other inodes, and of pinned ones without a name:
 * the daemon keeps a descriptor of those (Descriptors.keep_readable). */
static bool has_no_lookup_count(struct worker *worker, uint64_t inode)
{
    struct inode_record record;
    return view_inode(&worker->view, inode, &record) && (record.flags & (PINNED | UNLINKED)) == PINNED;
}

static bool forgets_nothing(struct worker *worker, const struct request *request)
{
    if (request->header->opcode == FUSE_FORGET)
        return has_no_lookup_count(worker, request->header->nodeid);
    const struct fuse_batch_forget_in *batch = request->body;
    const struct fuse_forget_one *each = (const void *)(batch + 1);
    for (uint32_t i = 0; i < batch->count; i++)
        if (!has_no_lookup_count(worker, each[i].nodeid))
            return false;
    return true;
}

static enum outcome serve_init(struct worker *worker, const struct request *request)
{
    const struct fuse_init_in *in = request->body;
    struct shared *shared = worker->fastpath->shared;
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION,
        .minor = in->minor < FUSE_KERNEL_MINOR_VERSION ? in->minor : FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = MAX_READAHEAD,
        .flags = in->flags & (INIT_FLAGS | (mounted_with(worker, NO_OPEN) ? 0 : FUSE_AUTO_INVAL_DATA)),
        .max_background = MAX_BACKGROUND,
        .congestion_threshold = CONGESTION,
        .max_write = MAX_WRITE,
        .time_gran = 1,
        .max_pages = MAX_READ_BYTES / 4096,
    };
    uint32_t body = request->header->len - (uint32_t)sizeof *request->header, length = body < INIT_BYTES ? body : INIT_BYTES;
    memcpy(shared->init, request->body, length);
    shared->init_length = length;
    answer(worker, request, 0, &out, sizeof out);
    relay_pass_init(&worker->fastpath->relay);
    return ANSWERED;
}

enum outcome answer_request(struct worker *worker, const struct request *request)
{
    switch (request->header->opcode) {
    case FUSE_INIT:
        return serve_init(worker, request);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_FLUSH:
    case FUSE_FSYNC:
        if (request->header->opcode == FUSE_FLUSH && mounted_with(worker, READ_ONLY))
            return answer(worker, request, ENOSYS, NULL, 0);
        if (request->header->opcode == FUSE_FSYNC && mounted_with(worker, READ_ONLY))
            return answer(worker, request, 0, NULL, 0); /* where OPEN is never sent, there is no handle */
        if (!(*(const uint64_t *)request->body & FAST_HANDLE))
            return PASS;
        return answer(worker, request, 0, NULL, 0); /* a handle of ours has no state */
    case FUSE_IOCTL: /* Python's open() asks each file whether it is a terminal */
    case FUSE_LSEEK:
    case FUSE_POLL:
        return answer(worker, request, ENOSYS, NULL, 0); /* as pyfuse3 would */
    case FUSE_ACCESS: /* default_permissions: the kernel has checked */
        return answer(worker, request, 0, NULL, 0);
    case FUSE_OPENDIR:
        return serve_opendir(worker, request);
    }
    if (!worker->fastpath->shared->serving || view_begin(&worker->view))
        return PASS;
    switch (request->header->opcode) {
    case FUSE_LOOKUP:
        return serve_lookup(worker, request);
    case FUSE_GETATTR:
        return serve_getattr(worker, request);
    case FUSE_OPEN:
        return serve_open(worker, request);
    case FUSE_READ: {
        enum outcome outcome;
        worker->bypasses_index = false;
        while ((outcome = answer_read(worker, request)) == AGAIN)
            if (view_begin(&worker->view))
                return PASS;
        return outcome;
    }
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        return answer_listing(worker, request);
    case FUSE_READLINK:
        return serve_readlink(worker, request);
    case FUSE_GETXATTR:
    case FUSE_LISTXATTR:
        return serve_xattr(worker, request);
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
        return forgets_nothing(worker, request) ? ANSWERED : PASS;
    default:
        return PASS;
    }
}
