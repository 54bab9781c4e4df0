/* LD_PRELOAD: notes in a log everything that a process does to the files beneath one directory, in order.
 *
 * A write is noted and made under one lock of all processes, so that the log has the order of the writes. A sync is
 * noted before and after: it covers what the log has before its beginning, and only when its end is there. The log is
 * opened anew for each entry, because daemons close descriptors that they do not know. Mappings are not seen.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum operation { WRITE = 1, SYNC_BEGIN, SYNC_END, ALLOCATE, TRUNCATE, CREATE, RENAME, UNLINK, MKDIR, RMDIR };

struct entry {
    uint32_t operation, mode; /* of fallocate; of a write: is it durable when it returns? */
    uint64_t inode, ticket;   /* a sync has one ticket for its two entries */
    int64_t offset, length;
    uint32_t path_bytes, data_bytes;
};

static const char *root, *log_path;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint32_t syncs;

#define REAL(result, name, ...) static result (*real_##name)(__VA_ARGS__)
REAL(int, open, const char *, int, ...);
REAL(int, openat, int, const char *, int, ...);
REAL(ssize_t, write, int, const void *, size_t);
REAL(ssize_t, writev, int, const struct iovec *, int);
REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t);
REAL(ssize_t, pwritev2, int, const struct iovec *, int, off_t, int);
REAL(int, fsync, int);
REAL(int, fdatasync, int);
REAL(int, ftruncate, int, off_t);
REAL(int, fallocate, int, int, off_t, off_t);
REAL(int, posix_fallocate, int, off_t, off_t);
REAL(int, rename, const char *, const char *);
REAL(int, unlink, const char *);
REAL(int, unlinkat, int, const char *, int);
REAL(int, mkdir, const char *, mode_t);
REAL(int, mkdirat, int, const char *, mode_t);
REAL(int, rmdir, const char *);
REAL(int, close, int);

static void *find(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

__attribute__((constructor)) static void start(void)
{
#define FIND(name) real_##name = find(#name)
    FIND(open), FIND(openat), FIND(write), FIND(writev), FIND(pwrite), FIND(pwritev), FIND(fsync), FIND(fdatasync);
    FIND(ftruncate), FIND(fallocate), FIND(posix_fallocate), FIND(rename), FIND(unlink), FIND(unlinkat), FIND(mkdir);
    FIND(mkdirat), FIND(rmdir), FIND(close), FIND(pwritev2);
    root = getenv("CRASH_ROOT");
    log_path = getenv("CRASH_LOG");
}

static bool below(const char *path)
{
    size_t length = root ? strlen(root) : 0;
    return length && !strncmp(path, root, length) && path[length] == '/';
}

/* The path of an open file, if it is below the root. */
static bool path_of(int fd, char path[PATH_MAX])
{
    char link[64];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = root ? readlink(link, path, PATH_MAX - 1) : -1;
    errno = before;
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && below(path);
}

static bool path_at(int directory, const char *name, char path[PATH_MAX])
{
    char above[PATH_MAX] = "";
    if (name[0] != '/' && directory == AT_FDCWD && !getcwd(above, sizeof above))
        return false;
    if (name[0] != '/' && directory != AT_FDCWD) {
        path_of(directory, above);
        if (root && !strcmp(above, root))
            return snprintf(path, PATH_MAX, "%s/%s", root, name) < PATH_MAX;
    }
    int length = name[0] == '/' ? snprintf(path, PATH_MAX, "%s", name) : snprintf(path, PATH_MAX, "%s/%s", above, name);
    return length < PATH_MAX && below(path);
}

static uint64_t inode_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static int begin(void)
{
    pthread_mutex_lock(&mutex);
    int log = real_open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (log < 0 || fcntl(log, F_SETLKW, &whole))
        abort();
    return log;
}

static void note(int log, struct entry entry, const char *path, const void *data)
{
    entry.path_bytes = (uint32_t)strlen(path);
    struct iovec parts[] = {{&entry, sizeof entry}, {(void *)path, entry.path_bytes}, {(void *)data, entry.data_bytes}};
    ssize_t all = (ssize_t)(sizeof entry + entry.path_bytes + entry.data_bytes);
    if (real_writev(log, parts, 3) != all)
        abort();
}

static void end(int log)
{
    int before = errno;
    real_close(log); /* gives the lock back */
    errno = before;
    pthread_mutex_unlock(&mutex);
}

static ssize_t record_write(int fd, const struct iovec *parts, int count, off_t offset, const char *path)
{
    int log = begin();
    int flags = fcntl(fd, F_GETFL);
    off_t at = offset >= 0 ? offset : (flags & O_APPEND) ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    ssize_t written = offset >= 0 ? real_pwritev(fd, parts, count, offset) : real_writev(fd, parts, count);
    if (written > 0) {
        char *data = malloc((size_t)written);
        size_t done = 0;
        for (int i = 0; i < count && done < (size_t)written; i++) {
            size_t left = (size_t)written - done, part = parts[i].iov_len < left ? parts[i].iov_len : left;
            memcpy(data + done, parts[i].iov_base, part);
            done += part;
        }
        struct entry entry = {.operation = WRITE, .mode = (flags & O_DSYNC) != 0, .inode = inode_of(fd), .offset = at,
                              .length = written, .data_bytes = (uint32_t)written};
        note(log, entry, path, data);
        free(data);
    }
    end(log);
    return written;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    char path[PATH_MAX];
    return path_of(fd, path) ? record_write(fd, parts, count, offset, path) : real_pwritev(fd, parts, count, offset);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    char path[PATH_MAX];
    return path_of(fd, path) ? record_write(fd, parts, count, offset, path)
                             : real_pwritev2(fd, parts, count, offset, flags);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char path[PATH_MAX];
    return path_of(fd, path) ? record_write(fd, parts, count, -1, path) : real_writev(fd, parts, count);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    char path[PATH_MAX];
    struct iovec part = {(void *)data, length};
    return path_of(fd, path) ? record_write(fd, &part, 1, offset, path) : real_pwrite(fd, data, length, offset);
}

ssize_t write(int fd, const void *data, size_t length)
{
    char path[PATH_MAX];
    struct iovec part = {(void *)data, length};
    return path_of(fd, path) ? record_write(fd, &part, 1, -1, path) : real_write(fd, data, length);
}

static int record_sync(int fd, int (*sync)(int), const char *path)
{
    struct entry entry = {.operation = SYNC_BEGIN, .inode = inode_of(fd)};
    int log = begin();
    entry.ticket = (uint64_t)getpid() << 32 | ++syncs;
    note(log, entry, path, NULL);
    end(log);
    int result = sync(fd);
    if (!result) {
        entry.operation = SYNC_END;
        log = begin();
        note(log, entry, path, NULL);
        end(log);
    }
    return result;
}

int fsync(int fd)
{
    char path[PATH_MAX];
    return path_of(fd, path) ? record_sync(fd, real_fsync, path) : real_fsync(fd);
}

int fdatasync(int fd)
{
    char path[PATH_MAX];
    return path_of(fd, path) ? record_sync(fd, real_fdatasync, path) : real_fdatasync(fd);
}

int ftruncate(int fd, off_t length)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return real_ftruncate(fd, length);
    int log = begin(), result = real_ftruncate(fd, length);
    if (!result)
        note(log, (struct entry){.operation = TRUNCATE, .inode = inode_of(fd), .length = length}, path, NULL);
    end(log);
    return result;
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return real_fallocate(fd, mode, offset, length);
    int log = begin(), result = real_fallocate(fd, mode, offset, length);
    if (!result)
        note(log, (struct entry){.operation = ALLOCATE, .mode = (uint32_t)mode, .inode = inode_of(fd), .offset = offset,
                                 .length = length}, path, NULL);
    end(log);
    return result;
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    int before = errno, result = fallocate(fd, 0, offset, length) ? errno : 0;
    errno = before;
    return result;
}

static void record_create(int fd)
{
    char path[PATH_MAX];
    if (fd < 0 || !path_of(fd, path))
        return;
    int log = begin();
    note(log, (struct entry){.operation = CREATE, .inode = inode_of(fd)}, path, NULL);
    end(log);
}

static mode_t mode_of(int flags, va_list arguments)
{
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

int open(const char *name, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    int fd = real_open(name, flags, mode_of(flags, arguments));
    va_end(arguments);
    if (flags & O_CREAT)
        record_create(fd);
    return fd;
}

int openat(int directory, const char *name, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    int fd = real_openat(directory, name, flags, mode_of(flags, arguments));
    va_end(arguments);
    if (flags & O_CREAT)
        record_create(fd);
    return fd;
}

static void record_name(int log, int result, enum operation operation, const char *path, const char *other)
{
    if (!result)
        note(log, (struct entry){.operation = operation, .data_bytes = (uint32_t)strlen(other)}, path, other);
    end(log);
}

int rename(const char *old, const char *new)
{
    char from[PATH_MAX], to[PATH_MAX];
    if (!path_at(AT_FDCWD, old, from) || !path_at(AT_FDCWD, new, to))
        return real_rename(old, new);
    int log = begin(), result = real_rename(old, new);
    record_name(log, result, RENAME, from, to);
    return result;
}

int unlink(const char *name)
{
    char path[PATH_MAX];
    if (!path_at(AT_FDCWD, name, path))
        return real_unlink(name);
    int log = begin(), result = real_unlink(name);
    record_name(log, result, UNLINK, path, "");
    return result;
}

int unlinkat(int directory, const char *name, int flags)
{
    char path[PATH_MAX];
    if (!path_at(directory, name, path))
        return real_unlinkat(directory, name, flags);
    int log = begin(), result = real_unlinkat(directory, name, flags);
    record_name(log, result, flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, "");
    return result;
}

int mkdir(const char *name, mode_t mode)
{
    char path[PATH_MAX];
    if (!path_at(AT_FDCWD, name, path))
        return real_mkdir(name, mode);
    int log = begin(), result = real_mkdir(name, mode);
    record_name(log, result, MKDIR, path, "");
    return result;
}

int mkdirat(int directory, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    if (!path_at(directory, name, path))
        return real_mkdirat(directory, name, mode);
    int log = begin(), result = real_mkdirat(directory, name, mode);
    record_name(log, result, MKDIR, path, "");
    return result;
}

int rmdir(const char *name)
{
    char path[PATH_MAX];
    if (!path_at(AT_FDCWD, name, path))
        return real_rmdir(name);
    int log = begin(), result = real_rmdir(name);
    record_name(log, result, RMDIR, path, "");
    return result;
}

/* The names with 64 are the same functions here. */
#define ALIAS(name) __attribute__((alias(#name)))
int open64(const char *name, int flags, ...) ALIAS(open);
int openat64(int directory, const char *name, int flags, ...) ALIAS(openat);
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) ALIAS(pwrite);
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) ALIAS(pwritev);
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) ALIAS(pwritev2);
int ftruncate64(int fd, off_t length) ALIAS(ftruncate);
int fallocate64(int fd, int mode, off_t offset, off_t length) ALIAS(fallocate);
int posix_fallocate64(int fd, off_t offset, off_t length) ALIAS(posix_fallocate);
