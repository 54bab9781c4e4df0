/* The loop of a serving thread (worker/worker.h). */
#pragma once

#include "worker/worker.h"

/* Returns when the mount is gone. */
void *serve_run(void *worker);
