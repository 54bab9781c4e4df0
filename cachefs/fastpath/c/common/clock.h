/* CLOCK_MONOTONIC, which cannot be set, and other clocks. Functions with external linkage, so that a test can replace them. */
#pragma once

#include <stdint.h>
#include <time.h>

uint64_t monotonic_ns(void);
int64_t clock_ns(clockid_t clock);
