#include "misses/window.h"

#include "common/assertion.h"

#define PAGE_BYTES 4096u
#define MAX_STEPS 64 /* pieces of a run that are looked at */

/* The piece that holds a byte. */
static bool piece_at_locked(const struct known *known, uint64_t offset, uint64_t *start, uint64_t *end) REQUIRES(miss_lock)
{
    struct extent extent;
    const struct fetch *fetch = find_fetch_locked(known->table, known->inode, known->version, offset, offset + 1);
    if (fetch) {
        *start = fetch->offset;
        *end = fetch->offset + fetch->length;
        return true;
    }
    if (!known->view || !view_extent(known->view, known->inode, offset, &extent) ||
        extent.record.version != known->version)
        return false;
    *start = extent.start;
    *end = extent.start + extent.record.length;
    return true;
}

uint64_t known_until_locked(const struct known *known, uint64_t start, uint64_t end)
{
    uint64_t begin, next;
    while (start < end && piece_at_locked(known, start, &begin, &next))
        start = next;
    return start < end ? start : end;
}

/* The start of the known run that ends at `offset`; of a run of many pieces, a place in it. */
static uint64_t run_start_locked(const struct known *known, uint64_t offset) REQUIRES(miss_lock)
{
    uint64_t begin, end;
    for (int step = 0; step < MAX_STEPS && offset && piece_at_locked(known, offset - 1, &begin, &end); step++)
        offset = begin;
    return offset;
}

/* The start of the next known piece, in [from, to]. */
static uint64_t next_known_locked(const struct known *known, uint64_t from, uint64_t to) REQUIRES(miss_lock)
{
    uint64_t next = next_fetch_start_locked(known->table, known->inode, known->version, from, to);
    return known->view ? view_next_extent(known->view, known->inode, from, next) : next;
}

static bool is_in_pieces(const struct known *known, uint64_t from, uint64_t to)
{
    int pieces = 0;
    for (uint64_t at = from; known->view && pieces < MAX_PIECES; at++, pieces++)
        if ((at = view_next_extent(known->view, known->inode, at, to)) == to)
            break;
    return pieces == MAX_PIECES;
}

static uint64_t at_most(uint64_t bytes, uint64_t most)
{
    return bytes < most ? bytes : most;
}

/* How much a READ at `offset` fetches: at the start of the file all or nothing, elsewhere a share of the run before it. */
static uint64_t share_locked(const struct known *known, uint64_t size, uint64_t offset) REQUIRES(miss_lock)
{
    uint64_t start, end;
    if (!offset)
        return piece_at_locked(known, size - 1, &start, &end) ? 0 : CHUNK_BYTES;
    uint64_t run = run_start_locked(known, offset);
    return at_most((offset - run) / (run ? ELSEWHERE : FROM_START) / REQUEST_BYTES * REQUEST_BYTES, CHUNK_BYTES);
}

struct window window_of_locked(const struct known *known, uint64_t size, uint64_t start, uint64_t end)
{
    ASSERT(start < end && end <= size);
    uint64_t chunk = start / CHUNK_BYTES * CHUNK_BYTES, after = at_most(chunk + CHUNK_BYTES, size);
    if (end <= after && is_in_pieces(known, chunk, after))
        return (struct window){chunk, after, false};
    struct window window = {start / PAGE_BYTES * PAGE_BYTES, (end + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES, false};
    uint64_t wanted = window.start + share_locked(known, size, window.start);
    if (wanted > window.end) {
        window.streams = window.start && wanted - window.start == CHUNK_BYTES;
        window.end = next_known_locked(known, window.end, wanted); /* without pieces that are known already */
    }
    window.end = at_most(window.end, size);
    return window;
}

struct window window_after_locked(const struct known *known, uint64_t size, uint64_t end)
{
    uint64_t to = at_most(end + CHUNK_BYTES, size);
    bool wanted = end < to && known_until_locked(known, end, end + 1) == end;
    return (struct window){end, wanted ? next_known_locked(known, end, to) : end, true};
}
