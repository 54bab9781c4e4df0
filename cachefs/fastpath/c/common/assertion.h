/* Assertions about our own state, in release builds, too. One that fails is our bug: the process ends, and the daemon starts
 * another one, which goes on with the requests in the shared memory. What comes from outside (the kernel, the daemon, the
 * index, the blob, the source, the memory that a predecessor left) is checked and refused instead. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#define ASSERT(condition) \
    (__builtin_expect(!(condition), 0) ? assertion_failed(__FILE__, __LINE__, #condition) : (void)0)

_Noreturn __attribute__((cold)) static inline void assertion_failed(const char *file, int line, const char *condition)
{
    fprintf(stderr, "fast path: %s:%d: assertion failed: %s\n", file, line, condition);
    abort();
}
