#include "shares.h"

#include <stdlib.h>

bool shares_init(struct shares *shares, uint32_t total, uint32_t places)
{
    *shares = (struct shares){.total = total, .places = places, .owners = calloc(places, sizeof *shares->owners)};
    return shares->owners;
}

static struct share *find(const struct shares *shares, uint32_t owner)
{
    for (uint32_t i = 0; i < shares->count; i++)
        if (shares->owners[i].owner == owner)
            return &shares->owners[i];
    return NULL;
}

uint32_t shares_held(const struct shares *shares, uint32_t owner)
{
    const struct share *share = find(shares, owner);
    return share ? share->held : 0;
}

bool shares_full(const struct shares *shares, uint32_t owner)
{
    if (shares->held >= shares->total)
        return true;
    uint32_t left = shares->total - shares->held - 1;
    return shares_held(shares, owner) + 1 > 3 * (uint64_t)left;
}

void shares_take(struct shares *shares, uint32_t owner)
{
    struct share *share = find(shares, owner);
    if (!share) {
        if (shares->count == shares->places)
            return; /* cannot be: nobody takes more than `places` */
        share = &shares->owners[shares->count++];
        *share = (struct share){.owner = owner};
    }
    share->held++;
    shares->held++;
}

void shares_give(struct shares *shares, uint32_t owner)
{
    struct share *share = find(shares, owner);
    if (!share)
        return;
    shares->held--;
    if (!--share->held)
        *share = shares->owners[--shares->count];
}
