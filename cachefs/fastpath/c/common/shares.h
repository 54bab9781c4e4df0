/* Places that all users need (slots, fetches, the lot) are shared by uid. The rule is that of shares.py: after taking a place
 * an owner has at most three times what is left free. One owner alone gets three quarters of all places, the next one three
 * quarters of the rest, and so on (hazard 31). A few owners take nearly everything that way. So there is a reserve besides:
 * an owner that has fewer than LEAST places may take one of it, which leaves room for reserve / LEAST more owners.
 *
 * The caller holds the lock of the places that are shared: relay_lock or miss_lock. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define DAEMON_OWNER UINT32_MAX /* work that no user waits for */
#define LEAST 2

struct share {
    uint32_t owner, taken;
};

struct shares {
    uint32_t total, reserve; /* places; `total` is without the reserve */
    uint32_t taken, places;
    uint32_t count;       /* owners that have a place; they are few, so they are searched one by one */
    struct share *owners; /* room for `places` */
};

/* `places`: the most that may be taken, beyond `total` and `reserve` if need be. False: no memory. */
bool shares_init(struct shares *shares, uint32_t total, uint32_t reserve, uint32_t places);
uint32_t shares_taken(const struct shares *shares, uint32_t owner);
/* May this owner take no more? */
bool shares_full(const struct shares *shares, uint32_t owner);
/* Allowed for full shares, too: a successor takes over what its predecessor left. */
void shares_take(struct shares *shares, uint32_t owner);
void shares_give(struct shares *shares, uint32_t owner);
