/* What the fast path answers, and from what: the table in docs/FASTPATH.md. */
#pragma once

#include "worker/worker.h"

enum outcome answer_request(struct worker *worker, const struct request *request);
