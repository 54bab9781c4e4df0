/* READs of immutable files, from the blob. A READ that the blob cannot answer is a miss (misses/miss.h). */
#pragma once

#include "worker/worker.h"

/* AGAIN: the index has changed meanwhile. */
enum outcome answer_read(struct worker *worker, const struct request *request);
