#include "common/buffer.h"

#include <sys/mman.h>

#include "common/assertion.h"

#define HUGE_BYTES (2u << 20)
#define MAX_KEPT 4

struct lock buffer_lock = LOCK_INIT;
/* Unused buffers. The last one is taken first: it may still be in the CPU's caches. */
static void *kept[MAX_KEPT] GUARDED_BY(buffer_lock);
static int kept_count GUARDED_BY(buffer_lock);

void *buffer_memory(size_t bytes)
{
    size_t whole = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    uint8_t *start = mmap(NULL, whole + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    size_t before = -(uintptr_t)start % HUGE_BYTES;
    if (before)
        munmap(start, before);
    munmap(start + before + whole, HUGE_BYTES - before);
    madvise(start + before, whole, MADV_HUGEPAGE);
    return start + before;
}

void *buffer_take(void)
{
    lock_take(&buffer_lock);
    void *buffer = kept_count ? kept[--kept_count] : NULL;
    lock_release(&buffer_lock);
    return buffer ? buffer : buffer_memory(BUFFER_BYTES);
}

void buffer_give(void *buffer)
{
    ASSERT(buffer && (uintptr_t)buffer % HUGE_BYTES == 0);
    lock_take(&buffer_lock);
    bool keep = kept_count < MAX_KEPT;
    if (keep)
        kept[kept_count++] = buffer;
    lock_release(&buffer_lock);
    if (!keep)
        munmap(buffer, BUFFER_BYTES);
}

void buffer_trim(void)
{
    lock_take(&buffer_lock);
    while (kept_count)
        munmap(kept[--kept_count], BUFFER_BYTES);
    lock_release(&buffer_lock);
}
