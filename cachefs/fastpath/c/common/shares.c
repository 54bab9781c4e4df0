#include "common/shares.h"

#include <stdlib.h>

#include "common/assertion.h"

bool shares_init(struct shares *shares, uint32_t total, uint32_t reserve, uint32_t places)
{
    *shares = (struct shares){
        .total = total, .reserve = reserve, .places = places, .owners = calloc(places, sizeof *shares->owners)};
    return shares->owners;
}

static struct share *find(const struct shares *shares, uint32_t owner)
{
    for (uint32_t i = 0; i < shares->count; i++)
        if (shares->owners[i].owner == owner)
            return &shares->owners[i];
    return NULL;
}

uint32_t shares_taken(const struct shares *shares, uint32_t owner)
{
    const struct share *share = find(shares, owner);
    return share ? share->taken : 0;
}

bool shares_full(const struct shares *shares, uint32_t owner)
{
    uint32_t taken = shares_taken(shares, owner);
    uint32_t left = shares->taken < shares->total ? shares->total - shares->taken - 1 : 0;
    if (taken + 1 <= 3 * (uint64_t)left)
        return false;
    return taken >= LEAST || shares->taken + 1 >= shares->total + shares->reserve;
}

void shares_take(struct shares *shares, uint32_t owner)
{
    struct share *share = find(shares, owner);
    if (!share) {
        ASSERT(shares->count < shares->places);
        share = &shares->owners[shares->count++];
        *share = (struct share){.owner = owner};
    }
    ASSERT(shares->taken < shares->places);
    share->taken++;
    shares->taken++;
}

void shares_give(struct shares *shares, uint32_t owner)
{
    struct share *share = find(shares, owner);
    ASSERT(share && share->taken && shares->taken);
    shares->taken--;
    if (!--share->taken)
        *share = shares->owners[--shares->count];
}
