#include "misses/window.h"

#define PAGE_BYTES 4096u
#define MAX_STEPS 64 /* so many pieces of a run are looked at */

/* The piece that holds a byte. */
static bool piece_at(const struct known *known, uint64_t offset, uint64_t *start, uint64_t *end)
{
    struct extent extent;
    const struct fetch *fetch = table_find(known->table, known->inode, known->version, offset, offset + 1);
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

uint64_t known_until(const struct known *known, uint64_t start, uint64_t end)
{
    uint64_t begin, next;
    while (start < end && piece_at(known, start, &begin, &next))
        start = next;
    return start < end ? start : end;
}

/* From where on everything up to `offset` is known; of a long run, somewhere in it. */
static uint64_t run_start(const struct known *known, uint64_t offset)
{
    uint64_t begin, end;
    for (int step = 0; step < MAX_STEPS && offset && piece_at(known, offset - 1, &begin, &end); step++)
        offset = begin;
    return offset;
}

/* Where the next known piece begins, in [from, to]. */
static uint64_t next_known(const struct known *known, uint64_t from, uint64_t to)
{
    uint64_t next = table_next(known->table, known->inode, known->version, from, to);
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

static uint64_t share_of_run(const struct known *known, uint64_t offset)
{
    uint64_t run = run_start(known, offset);
    return at_most((offset - run) / (run ? ELSEWHERE : FROM_START) / REQUEST_BYTES * REQUEST_BYTES, CHUNK_BYTES);
}

static uint64_t share_of_start(const struct known *known, uint64_t size)
{
    uint64_t start, end;
    return piece_at(known, size - 1, &start, &end) ? 0 : CHUNK_BYTES;
}

struct window window_of(const struct known *known, uint64_t size, uint64_t start, uint64_t end)
{
    uint64_t chunk = start / CHUNK_BYTES * CHUNK_BYTES, after = at_most(chunk + CHUNK_BYTES, size);
    if (end <= after && is_in_pieces(known, chunk, after))
        return (struct window){chunk, after, false};
    struct window window = {start / PAGE_BYTES * PAGE_BYTES, (end + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES, false};
    uint64_t wanted = window.start + (window.start ? share_of_run(known, window.start) : share_of_start(known, size));
    if (wanted > window.end) {
        window.streams = window.start && wanted - window.start == CHUNK_BYTES;
        window.end = next_known(known, window.end, wanted); /* but nothing that is known already */
    }
    window.end = at_most(window.end, size);
    return window;
}

struct window window_after(const struct known *known, uint64_t size, uint64_t end)
{
    uint64_t to = at_most(end + CHUNK_BYTES, size);
    bool wanted = end < to && known_until(known, end, end + 1) == end;
    return (struct window){end, wanted ? next_known(known, end, to) : end, true};
}
