/* CLOCK_MONOTONIC, which cannot be set. A function with external linkage, so that a test can replace it. */
#pragma once

#include <stdint.h>

uint64_t monotonic_ns(void);
