#include "worker/worker.h"

struct lock leader_lock = LOCK_INIT;

int worker_init(struct worker *worker, struct fastpath *fastpath, struct counters *counters, uint8_t *scratch)
{
    ASSERT((uintptr_t)scratch % DIRECT_ALIGNMENT == 0);
    *worker = (struct worker){.fastpath = fastpath, .counters = counters, .slot = NO_SLOT, .scratch = scratch};
    return fastpath->index.env[DURABLE] ? view_init(&worker->view, &fastpath->index) : 0;
}

UNCHECKED void leader_become(struct worker *worker)
{
    if (!worker->is_leader)
        lock_take(&leader_lock);
    worker->is_leader = true;
}

UNCHECKED void leader_resign(struct worker *worker)
{
    if (worker->is_leader)
        lock_release(&leader_lock);
    worker->is_leader = false;
}
