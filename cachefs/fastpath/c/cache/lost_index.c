#include "cache/lost_index.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define LINE_BYTES (PATH_MAX + 128)
#define PART_BYTES 4096
#define LARGEST_PAGE_BYTES 32768u

struct mapping {
    uintptr_t start, end;
};

static struct shared *watched;
static uint8_t *silent;
static size_t page_bytes;
static atomic_bool is_lost;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), suffix = strlen(end);
    return length >= suffix && !strcmp(text + length - suffix, end);
}

/* Is this line of /proc/self/maps that of the mapping with this address? */
static bool is_of(const char *line, uintptr_t address, struct mapping *found)
{
    char *end;
    found->start = strtoul(line, &end, 16);
    found->end = *end == '-' ? strtoul(end + 1, NULL, 16) : 0;
    return found->start <= address && address < found->end;
}

/* Returns the line of the mapping with this address, which ends with the path of its file; NULL if there is none. Without
 * stdio, which a signal handler must not call. */
static const char *find_mapping(uintptr_t address, struct mapping *found)
{
    static char line[LINE_BYTES], part[PART_BYTES];
    const char *answer = NULL;
    size_t length = 0;
    ssize_t got;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    while (maps >= 0 && !answer && (got = read(maps, part, sizeof part)) > 0)
        for (ssize_t at = 0; at < got && !answer; at++) {
            if (part[at] != '\n') {
                if (length < sizeof line - 1)
                    line[length++] = part[at];
                continue;
            }
            line[length] = 0;
            length = 0;
            if (is_of(line, address, found))
                answer = line;
        }
    if (maps >= 0)
        close(maps);
    return answer;
}

/* A leaf with one empty key, and, as a meta page, no tables. An empty leaf would not do: LMDB reads its last key. */
static bool make_silent_page(void)
{
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t size = page_bytes < LARGEST_PAGE_BYTES ? page_bytes : LARGEST_PAGE_BYTES; /* LMDB's */
    if (!silent && !(silent = calloc(1, page_bytes)))
        return false;
    uint16_t head[] = {2, 18, (uint16_t)(size - 8), (uint16_t)(size - 8)}; /* a leaf, its bounds, the offset of the key */
    for (uint8_t *page = silent; page < silent + page_bytes; page += size) {
        memcpy(page + 10, head, sizeof head);
        memset(page + 80, 0xff, sizeof(uint64_t));
        memset(page + 128, 0xff, sizeof(uint64_t));
    }
    return true;
}

/* At once, because other threads may use it. What cannot be read of `from` is 0. */
static bool put(uintptr_t start, size_t size, const void *from)
{
    void *new = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (new == MAP_FAILED)
        return false;
    struct iovec source = {(void *)from, size}, target = {new, size};
    (void)!process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    return mremap(new, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)start) != MAP_FAILED;
}

static bool replace(uintptr_t address)
{
    struct mapping found;
    const char *line = find_mapping(address, &found);
    if (!line)
        return false;
    if (ends_with(line, "/data.mdb"))
        return put(address - address % page_bytes, page_bytes, silent);
    if (ends_with(line, "/lock.mdb"))
        return put(found.start, found.end - found.start, (void *)found.start);
    return !strchr(line, '/'); /* no file any more: another thread was faster */
}

static void handle(int number, siginfo_t *info, void *context)
{
    static const char line[] = "fast path: the disk of the cache fails: the index is not used any more\n";
    (void)context;
    int saved = errno;
    while (atomic_flag_test_and_set(&busy)) /* another thread is here */
        ;
    if (info->si_code != BUS_ADRERR || !replace((uintptr_t)info->si_addr)) {
        signal(number, SIG_DFL); /* the instruction is repeated, and ends the process */
    } else if (!atomic_exchange(&is_lost, true)) {
        watched->serving = 0; /* tells the daemon */
        (void)!write(STDERR_FILENO, line, sizeof line - 1);
    }
    atomic_flag_clear(&busy);
    errno = saved;
}

bool lost_index_watch(struct shared *shared)
{
    watched = shared;
    if (!make_silent_page())
        return false;
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO};
    return !sigaction(SIGBUS, &action, NULL);
}

bool index_is_lost(void)
{
    if (!atomic_load_explicit(&is_lost, memory_order_relaxed))
        return false;
    watched->serving = 0; /* the daemon may have set it meanwhile */
    return true;
}
