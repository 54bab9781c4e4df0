/* Answers requests from the index: the table in docs/FASTPATH.md. */
#pragma once

#include "worker/worker.h"

enum outcome answer_request(struct worker *worker, const struct request *request);
