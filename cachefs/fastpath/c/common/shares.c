#include "common/shares.h"

#include <stdlib.h>

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

uint32_t shares_held(const struct shares *shares, uint32_t owner)
{
    const struct share *share = find(shares, owner);
    return share ? share->held : 0;
}

bool shares_full(const struct shares *shares, uint32_t owner)
{
    uint32_t held = shares_held(shares, owner);
    uint32_t left = shares->held < shares->total ? shares->total - shares->held - 1 : 0;
    if (held + 1 <= 3 * (uint64_t)left)
        return false;
    return held >= LEAST || shares->held + 1 >= shares->total + shares->reserve;
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
