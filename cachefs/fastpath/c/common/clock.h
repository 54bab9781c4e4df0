/* CLOCK_MONOTONIC, which cannot be set. The function has external linkage, so that a test can replace it. */
#pragma once

#include <stdint.h>

uint64_t monotonic_ns(void);
