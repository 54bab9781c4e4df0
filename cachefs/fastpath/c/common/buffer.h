/* Memory for reads from disks, in huge pages where the kernel gives any: a read is then one piece for the device and not
 * one for each 4 KiB (54 KB from a virtual disk: 52 µs instead of 73; four at a time: 25 instead of 46 each). */
#pragma once

#include "common/contract.h"
#include "common/lock.h"

#define BUFFER_BYTES CHUNK_BYTES

/* Is never given back. NULL: no memory. */
void *buffer_memory(size_t bytes);
/* A buffer of BUFFER_BYTES, which costs memory only as far as it is used. Any thread. NULL: no memory. */
void *buffer_take(void) EXCLUDES(buffer_lock);
void buffer_give(void *buffer) EXCLUDES(buffer_lock);
/* Gives unused buffers back to the system. */
void buffer_trim(void) EXCLUDES(buffer_lock);
