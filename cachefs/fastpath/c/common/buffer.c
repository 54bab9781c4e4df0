#include "common/buffer.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#define HUGE_BYTES (2u << 20)
#define MAX_KEPT 4

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *kept[MAX_KEPT]; /* given back; the last one first, as far as it is still in the caches */
static int kept_count;

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
    pthread_mutex_lock(&lock);
    void *buffer = kept_count ? kept[--kept_count] : NULL;
    pthread_mutex_unlock(&lock);
    return buffer ? buffer : buffer_memory(BUFFER_BYTES);
}

void buffer_give(void *buffer)
{
    pthread_mutex_lock(&lock);
    bool keep = kept_count < MAX_KEPT;
    if (keep)
        kept[kept_count++] = buffer;
    pthread_mutex_unlock(&lock);
    if (!keep)
        munmap(buffer, BUFFER_BYTES);
}

void buffer_trim(void)
{
    pthread_mutex_lock(&lock);
    while (kept_count)
        munmap(kept[--kept_count], BUFFER_BYTES);
    pthread_mutex_unlock(&lock);
}
