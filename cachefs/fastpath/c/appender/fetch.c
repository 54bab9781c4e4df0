#include "appender/fetch.h"

#include <stdlib.h>
#include <string.h>

struct fetch *fetch_new(const struct inode_record *record, uint64_t inode, const char *path)
{
    size_t length = strlen(path) + 1;
    struct fetch *fetch = malloc(sizeof *fetch + length);
    if (!fetch)
        return NULL;
    *fetch = (struct fetch){.record = *record, .inode = inode, .state = FETCH_QUEUED};
    memcpy(fetch->path, path, length);
    return fetch;
}

void queue_push(struct fetch_queue *queue, struct fetch *fetch)
{
    fetch->queue_next = NULL;
    *(queue->first ? &queue->last->queue_next : &queue->first) = fetch;
    queue->last = fetch;
}

struct fetch *queue_pop(struct fetch_queue *queue)
{
    struct fetch *fetch = queue->first;
    if (fetch)
        queue->first = fetch->queue_next;
    return fetch;
}

/* A fetch that is not in the queue is ignored. */
void queue_remove(struct fetch_queue *queue, struct fetch *fetch)
{
    struct fetch *before = NULL;
    for (struct fetch **at = &queue->first; *at; before = *at, at = &(*at)->queue_next)
        if (*at == fetch) {
            *at = fetch->queue_next;
            if (queue->last == fetch)
                queue->last = before;
            return;
        }
}
