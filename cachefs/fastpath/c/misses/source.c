#include "misses/source.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "cache/blob.h"
#include "common/assertion.h"
#include "common/buffer.h"

#ifndef STATX_MNT_ID_UNIQUE
#define STATX_MNT_ID_UNIQUE 0x4000u /* Linux 6.8 */
#endif
#define HANDLE_INO32 1    /* FILEID_INO32_GEN */
#define HANDLE_INO64 0x81 /* XFS with inode numbers of 64 bits */
#define OPEN_TRIES 4
#define READ_FLAGS (O_RDONLY | O_NONBLOCK | O_NOCTTY)
#define MAX_GROUPS 256 /* more than root has */
#define DIRECT_BYTES (2u << 20) /* from this size on a read goes past the page cache; below it read-ahead is worth more */

static void simulate_latency(const struct shared *shared)
{
    if (shared->simulate_latency_ns)
        usleep((useconds_t)(shared->simulate_latency_ns / 1000));
}

static int open_at(int directory, const char *path, uint64_t flags)
{
    struct open_how how = {
        .flags = flags | O_NOFOLLOW | O_CLOEXEC, /* hazard 21 */
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    /* EAGAIN, EXDEV: a rename raced with the walk (EXDEV: the object is outside by now), and the next try finds the object
     * that is there now. Or another process has a lease on the file (hazard 30): then Python serves it, whose call_pool.py
     * tries again after a pause, without a thread that waits. */
    int fd = -1;
    for (int tries = 0; tries < OPEN_TRIES && fd < 0; tries++) {
        fd = (int)syscall(SYS_openat2, directory, path, &how, sizeof how);
        if (fd < 0 && errno != EAGAIN && errno != EXDEV && errno != EINTR)
            break;
    }
    return fd;
}

/* A system call takes PATH_MAX bytes, the final zero included. A longer path is walked in pieces: a directory that is moved
 * meanwhile keeps its children, and `same_version` compares the file that is found. */
static int open_beneath(int directory, const char *path, uint64_t flags)
{
    int above = directory, fd = 0;
    for (size_t length = strlen(path); length >= PATH_MAX && fd >= 0;) {
        char piece[PATH_MAX];
        const char *slash = memrchr(path, '/', PATH_MAX);
        size_t taken = (size_t)(slash - path);
        memcpy(piece, path, taken);
        piece[taken] = 0;
        fd = open_at(above, piece, O_PATH | O_DIRECTORY);
        if (above != directory)
            close(above);
        above = fd;
        path += taken + 1;
        length -= taken + 1;
    }
    if (fd >= 0)
        fd = open_at(above, path, flags);
    if (above != directory && above >= 0)
        close(above);
    return fd;
}

static bool has_ids(uint32_t user, uint32_t group)
{
    return (uint32_t)setfsuid(UINT32_MAX) == user && (uint32_t)setfsgid(UINT32_MAX) == group; /* no id: nothing changes */
}

/* Opens a file as the user who reads it, whom the kernel has let in by the mode of the file. A source that squashes root (NFS
 * with root_squash) refuses root what only the owner may read: credentials.py has the rule. The user's other groups do not
 * count here; if they matter, Python serves the file. A user who is not root has no capabilities for files. */
static int open_as(uint32_t user, uint32_t group, int directory, const char *path, uint64_t flags)
{
    uint32_t own_user = geteuid(), own_group = getegid();
    gid_t groups[MAX_GROUPS];
    int fd = -1, count = getgroups(MAX_GROUPS, groups);
    if (own_user || count < 0 || syscall(SYS_setgroups, 0, NULL)) /* setgroups() would change all threads */
        return -1;
    setfsgid(group);
    setfsuid(user); /* takes the capabilities for files as well */
    if (has_ids(user, group))
        fd = open_beneath(directory, path, flags);
    setfsuid(own_user);
    setfsgid(own_group);
    if (!has_ids(own_user, own_group) || syscall(SYS_setgroups, (size_t)count, groups))
        abort(); /* this thread must not go on as another user */
    return fd;
}

/* `user`: 0: as this process only. */
static int open_as_admitted(uint32_t user, uint32_t group, int directory, const char *path, uint64_t flags)
{
    int fd = open_beneath(directory, path, flags);
    return fd < 0 && (errno == EACCES || errno == EPERM) && user ? open_as(user, group, directory, path, flags) : fd;
}

/* Clamped to the range of times in the index: `clamped_ns` of system/stat.py. */
static int64_t nanoseconds(const struct statx_timestamp *time)
{
    __int128 ns = (__int128)time->tv_sec * 1000000000 + time->tv_nsec;
    return ns > INT64_MAX ? INT64_MAX : ns < INT64_MIN ? INT64_MIN : (int64_t)ns;
}

/* volumes.py: is the object of this volume? A place that the daemon has not identified yet is of none. */
static bool is_of_volume(const struct shared *shared, const struct statx *now, uint64_t number)
{
    struct volumes *volumes = shared_volumes(shared);
    uint64_t device = makedev(now->stx_dev_major, now->stx_dev_minor), count = volumes->count;
    for (uint64_t i = 0; i < count && i < MAX_VOLUMES; i++)
        if (volumes->entries[i].mount == now->stx_mnt_id && volumes->entries[i].device == device)
            return volumes->entries[i].number == number;
    return false;
}

/* records.py: a record without a number (NO_NUMBER) is of a source whose numbers do not stay. */
static bool same_number(uint64_t recorded, uint64_t now)
{
    return recorded == now || !recorded;
}

/* `Inode.same_access` of records.py */
static bool same_access(const struct inode_record *expected, const struct statx *now)
{
    return expected->ctime_ns % 1000000000 || /* not in whole seconds */
           (now->stx_mode == expected->mode && now->stx_uid == expected->uid && now->stx_gid == expected->gid);
}

/* `generation_of` of syscalls.py, which is asked only where such file handles are. False: not known. */
static bool generation_of(int fd, uint64_t *inode, uint32_t *generation)
{
    struct {
        struct file_handle head;
        uint8_t bytes[MAX_HANDLE_SZ];
    } handle = {.head.handle_bytes = MAX_HANDLE_SZ};
    int mount;
    if (name_to_handle_at(fd, "", &handle.head, &mount, AT_EMPTY_PATH))
        return false;
    size_t inode_bytes = handle.head.handle_type == HANDLE_INO32 ? 4 : handle.head.handle_type == HANDLE_INO64 ? 8 : 0;
    *inode = 0;
    memcpy(inode, handle.head.f_handle, inode_bytes); /* little-endian */
    memcpy(generation, handle.head.f_handle + inode_bytes, sizeof *generation);
    return inode_bytes;
}

/* `Identity.is_of` of records.py. Times in whole seconds do not show that an inode number was used again. */
static bool same_birth(int fd, const struct inode_record *expected, const struct statx *now)
{
    int64_t born = now->stx_mask & STATX_BTIME ? nanoseconds(&now->stx_btime) : 0;
    uint64_t inode;
    uint32_t generation;
    if (expected->btime_ns <= 0) /* not known, or USED_ONCE */
        return true;
    if (!born && generation_of(fd, &inode, &generation) && inode == now->stx_ino)
        born = (int64_t)generation + 1;
    return !born || born == expected->btime_ns;
}

/* Is this the version of the index? identity.py has the rule: if nothing differs after the read, nothing changed before or
 * during it, and it was the right file, even if its path leads elsewhere by now (hazard 23). */
static bool same_version(const struct shared *shared, int fd, const struct inode_record *expected, struct counters *counters)
{
    struct statx now;
    int flags = AT_EMPTY_PATH | (shared->source_flags & SOURCE_INCOHERENT ? AT_STATX_FORCE_SYNC : 0);
    counters->source_fstats++;
    return !statx(fd, "", flags, STATX_BASIC_STATS | STATX_BTIME | STATX_MNT_ID | STATX_MNT_ID_UNIQUE, &now) &&
           S_ISREG(now.stx_mode) && nanoseconds(&now.stx_ctime) == expected->ctime_ns &&
           nanoseconds(&now.stx_mtime) == expected->mtime_ns && now.stx_size == expected->size &&
           same_number(expected->source_inode, now.stx_ino) && same_access(expected, &now) &&
           is_of_volume(shared, &now, expected->device) && same_birth(fd, expected, &now);
}

static bool look(uint32_t user, uint32_t group, int directory, const char *path, struct statx *now, struct counters *counters)
{
    int fd = open_as_admitted(user, group, directory, path, O_PATH);
    counters->source_fstats += fd >= 0;
    bool good = fd >= 0 && !statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, now);
    if (fd >= 0)
        close(fd);
    return good;
}

/* Looks at the directory that a file is in, by its path. */
static bool look_above(uint32_t user, uint32_t group, int directory, const char *path, struct statx *now,
                       struct counters *counters)
{
    char *above = strndup(path, (size_t)(strrchr(path, '/') - path));
    bool good = above && look(user, group, directory, above, now, counters);
    free(above);
    return good;
}

/* `has_moved` of directories.py */
static bool has_moved(const struct statx *before, const struct statx *after)
{
    if (before->stx_ino != after->stx_ino)
        return true;
    int64_t changed = nanoseconds(&after->stx_ctime), modified = nanoseconds(&after->stx_mtime);
    return changed != nanoseconds(&before->stx_ctime) && (modified == nanoseconds(&before->stx_mtime) || modified != changed);
}

/* Large pieces are read past the page cache of the source: they go to the blob and to the mount's page cache, and another
 * copy costs more than the disk. */
static bool go_direct(int fd, bool direct)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
}

/* Past pages that the kernel keeps of the source, and that may be outdated (syscalls.py). */
static bool read_past_pages(int fd, uint8_t *buffer, size_t length, uint64_t offset, struct counters *counters)
{
    bool direct = go_direct(fd, true);
    if (!direct)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    for (size_t done = 0; done < length;) {
        counters->source_reads++;
        ssize_t got = pread(fd, buffer + done, length - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EINVAL && direct && go_direct(fd, false)) {
            direct = false;
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            continue;
        }
        if (got <= 0)
            return false;
        done += (size_t)got;
        counters->source_bytes += (uint64_t)got;
    }
    return true;
}

static bool may_have_old_pages(const struct shared *shared, const struct inode_record *expected)
{
    struct timespec now;
    if (shared->source_flags & SOURCE_INCOHERENT)
        return true;
    clock_gettime(CLOCK_REALTIME, &now);
    return shared->source_flags & SOURCE_PAGES_ARE_LATE && expected->ctime_ns > (now.tv_sec * 1000000000LL) - (int64_t)LATE_NS;
}

/* `room`: the size of the buffer, whole pages. */
static bool read_piece(int fd, uint8_t *buffer, size_t length, size_t room, uint64_t offset, struct counters *counters)
{
    bool direct = length >= DIRECT_BYTES && offset % DIRECT_ALIGNMENT == 0 && go_direct(fd, true);
    size_t done = 0;
    while (done < length) {
        counters->source_reads++;
        ssize_t got = pread(fd, buffer + done, (direct ? room : length) - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        size_t more = got > 0 ? (size_t)got : 0;
        if (direct && (got < 0 || more % DIRECT_ALIGNMENT)) {
            direct = false; /* O_DIRECT failed, or ended within a page: the rest is read without it */
            if (!go_direct(fd, false))
                return false;
        } else if (!more) {
            return false;
        }
        done += more;
        counters->source_bytes += more;
    }
    return true;
}

uint8_t *source_read(const struct shared *shared, int directory, const char *path, const struct inode_record *expected,
                     uint64_t offset, uint32_t length, uint32_t user, uint32_t group, struct counters *counters)
{
    ASSERT(length <= BUFFER_BYTES);
    if (shared->source_flags & SOURCE_IS_SNAPSHOT)
        return NULL;
    size_t room = ((size_t)length + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    uint8_t *buffer = length < DIRECT_BYTES ? malloc(length) : buffer_take();
    if (!buffer)
        return NULL;
    counters->source_opens++;
    simulate_latency(shared);
    if (expected->device)
        user = 0; /* a filesystem beneath the source, which a user may have mounted, may be closed to all others */
    /* Where a descriptor follows its path, so does the comparison. Between the looks above, the directory stays where it is.
     * But of two exchanges in one tick of the kernel's clock, the second one may give the directory that comes the times that
     * the other one had, and a mergerfs gives it the other one's number: so the path must lead to the file at first, too. */
    struct statx before, after, found;
    bool follows = shared->source_flags & SOURCE_BY_PATH && strchr(path, '/');
    bool good = !follows || (look_above(user, group, directory, path, &before, counters) &&
                             look(user, group, directory, path, &found, counters) &&
                             same_number(expected->source_inode, found.stx_ino));
    int fd = good ? open_as_admitted(user, group, directory, path, READ_FLAGS) : -1;
    good = false;
    if (fd >= 0) {
        simulate_latency(shared);
        good = may_have_old_pages(shared, expected) ? read_past_pages(fd, buffer, length, offset, counters)
                                                    : read_piece(fd, buffer, length, room, offset, counters);
        good = good && same_version(shared, fd, expected, counters);
        if (good && follows)
            good = look_above(user, group, directory, path, &after, counters) && !has_moved(&before, &after);
        close(fd);
    }
    if (good)
        return buffer;
    source_free(buffer, length);
    return NULL;
}

void source_free(uint8_t *payload, uint32_t length)
{
    if (length < DIRECT_BYTES)
        free(payload);
    else if (payload)
        buffer_give(payload);
}
