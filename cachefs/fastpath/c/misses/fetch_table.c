#include "misses/fetch_table.h"

#include <stdlib.h>

#include "common/assertion.h"
#include "misses/source.h"

static struct fetch **bucket_of(struct fetch_table *table, uint64_t inode, uint64_t offset)
{
    uint64_t hash = (inode ^ offset / CHUNK_BYTES << 40) * 0x9E3779B97F4A7C15u;
    return &table->buckets[hash >> 52];
}

void fetch_release_locked(struct fetch *fetch)
{
    ASSERT(fetch->references > 0);
    if (--fetch->references > 0)
        return;
    source_free(fetch->payload, fetch->length);
    fetch->payload = NULL;
    if (!fetch->in_table)
        free(fetch);
}

/* Assigns the fetch to its owner or to the first of its waiters whose share has room. False: none has room. `full`: an owner
 * whose share is known to be full. */
static bool find_owner_locked(struct fetch *fetch, const struct shares *shares, uint32_t *full) REQUIRES(miss_lock)
{
    const struct waiter *waiter = fetch->waiters;
    for (uint32_t owner = fetch->owner;; waiter = waiter->next) {
        if (owner != *full && !shares_full(shares, owner)) {
            fetch->owner = owner;
            return true;
        }
        *full = owner;
        if (!waiter)
            return false;
        owner = waiter->owner;
    }
}

struct fetch *queue_pop_fair_locked(struct fetch_queue *queue, const struct shares *shares)
{
    /* Most queued fetches belong to one owner with a full share: that share is looked up once. */
    uint32_t full = DAEMON_OWNER; /* its fetches are never queued */
    struct fetch *fetch = queue->first;
    while (fetch && !find_owner_locked(fetch, shares, &full))
        fetch = fetch->queue_next;
    if (fetch)
        queue_remove(queue, fetch);
    return fetch;
}

static bool is_of(const struct fetch *fetch, uint64_t inode, uint64_t version)
{
    return fetch->cached && fetch->inode == inode && fetch->record.version == version;
}

struct fetch *find_fetch_locked(struct fetch_table *table, uint64_t inode, uint64_t version, uint64_t start, uint64_t end)
{
    /* A fetch is no longer than a chunk: it begins in this chunk or in the one before it. */
    uint64_t first = start < CHUNK_BYTES ? start : start - CHUNK_BYTES;
    for (uint64_t offset = first; offset <= start; offset += CHUNK_BYTES)
        for (struct fetch *fetch = *bucket_of(table, inode, offset); fetch; fetch = fetch->bucket_next)
            if (is_of(fetch, inode, version) && fetch->offset <= start && fetch->offset + fetch->length >= end)
                return fetch;
    return NULL;
}

uint64_t next_fetch_start_locked(struct fetch_table *table, uint64_t inode, uint64_t version, uint64_t from, uint64_t to)
{
    uint64_t next = to;
    for (uint64_t chunk = from / CHUNK_BYTES; chunk <= to / CHUNK_BYTES; chunk++)
        for (struct fetch *fetch = *bucket_of(table, inode, chunk * CHUNK_BYTES); fetch; fetch = fetch->bucket_next)
            if (is_of(fetch, inode, version) && fetch->offset >= from && fetch->offset < next)
                next = fetch->offset;
    return next;
}

void add_to_table_locked(struct fetch_table *table, struct fetch *fetch)
{
    ASSERT(!fetch->in_table && fetch->length && fetch->length <= CHUNK_BYTES);
    struct fetch **bucket = bucket_of(table, fetch->inode, fetch->offset);
    fetch->bucket_next = *bucket;
    *bucket = fetch;
    fetch->older = table->newest;
    fetch->newer = NULL;
    *(table->newest ? &table->newest->newer : &table->oldest) = fetch;
    table->newest = fetch;
    fetch->in_table = true;
}

void remove_from_table_locked(struct fetch_table *table, struct fetch *fetch)
{
    if (!fetch->in_table)
        return;
    struct fetch **at = bucket_of(table, fetch->inode, fetch->offset);
    while (*at != fetch)
        at = &(*at)->bucket_next;
    *at = fetch->bucket_next;
    *(fetch->older ? &fetch->older->newer : &table->oldest) = fetch->newer;
    *(fetch->newer ? &fetch->newer->older : &table->newest) = fetch->older;
    fetch->in_table = false;
}

struct fetch *oldest_unfetched_locked(struct fetch_table *table)
{
    for (struct fetch *fetch = table->oldest; fetch; fetch = fetch->newer)
        if (fetch->state == FETCH_QUEUED || fetch->state == FETCH_FETCHING)
            return fetch;
    return NULL;
}

struct waiter *take_waiter_locked(struct fetch_table *table, uint64_t unique)
{
    for (struct fetch *fetch = table->oldest; fetch; fetch = fetch->newer)
        for (struct waiter **at = &fetch->waiters; *at; at = &(*at)->next)
            if ((*at)->unique == unique) {
                struct waiter *waiter = *at;
                *at = waiter->next;
                return waiter;
            }
    return NULL;
}

void add_pending_locked(struct fetch_table *table, struct fetch *fetch)
{
    ASSERT(fetch->in_table && fetch->state == FETCH_APPENDED);
    queue_push(&table->pending, fetch);
}

void resolve_pending_locked(struct fetch_table *table, uint64_t number)
{
    while (table->pending.first && table->pending.first->report <= number) {
        struct fetch *fetch = queue_pop(&table->pending);
        remove_from_table_locked(table, fetch);
        if (fetch->references == 0)
            free(fetch);
    }
}
