#include "cache/lost_index.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define LINE_BYTES (PATH_MAX + 128)
#define LARGEST_PAGE_BYTES 32768u

struct mapping {
    uintptr_t start, end;
};

static struct mapping data, table;
static struct shared *watched;
static uint8_t *silent;
static size_t page_bytes;
static atomic_bool is_lost, has_copy;
static atomic_flag busy = ATOMIC_FLAG_INIT;

static bool holds(const struct mapping *mapping, uintptr_t address)
{
    return mapping->start <= address && address < mapping->end;
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
    if (holds(&data, address))
        return put(address - address % page_bytes, page_bytes, silent);
    if (!holds(&table, address))
        return false;
    return atomic_load(&has_copy) || (put(table.start, table.end - table.start, (void *)table.start) &&
                                      (atomic_store(&has_copy, true), true));
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

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), suffix = strlen(end);
    return length >= suffix && !strcmp(text + length - suffix, end);
}

bool lost_index_watch(struct shared *shared)
{
    static char line[LINE_BYTES];
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps)
        return false;
    while (fgets(line, sizeof line, maps)) {
        struct mapping found;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%lx-%lx", &found.start, &found.end) != 2)
            continue;
        if (ends_with(line, "/data.mdb"))
            data = found;
        else if (ends_with(line, "/lock.mdb"))
            table = found;
    }
    fclose(maps);
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
