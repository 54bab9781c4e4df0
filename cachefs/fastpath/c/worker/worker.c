#include "worker/worker.h"

int worker_init(struct worker *worker, struct fastpath *fastpath, struct counters *counters, uint8_t *scratch)
{
    *worker = (struct worker){.fastpath = fastpath, .counters = counters, .slot = NO_SLOT, .scratch = scratch};
    return view_init(&worker->view, &fastpath->index);
}

void take_turn(struct worker *worker)
{
    if (!worker->has_turn)
        pthread_mutex_lock(&worker->fastpath->turn);
    worker->has_turn = true;
}

void give_turn(struct worker *worker)
{
    if (worker->has_turn)
        pthread_mutex_unlock(&worker->fastpath->turn);
    worker->has_turn = false;
}
