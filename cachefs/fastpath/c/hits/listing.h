/* READDIR and READDIRPLUS of directories whose listing is complete. */
#pragma once

#include "worker/worker.h"

enum outcome answer_listing(struct worker *worker, const struct request *request);
