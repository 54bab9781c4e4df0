/* Threads that take turns in listening to /dev/fuse; each serves what it has read. */
#pragma once

#include "worker/worker.h"

/* Until the mount is gone. */
void *serve_run(void *worker);
