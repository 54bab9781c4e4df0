#include "common/assertion.h"

#include <stdio.h>
#include <stdlib.h>

void assertion_failed(const char *file, int line, const char *condition)
{
    fprintf(stderr, "fast path: %s:%d: assertion failed: %s\n", file, line, condition);
    abort();
}
