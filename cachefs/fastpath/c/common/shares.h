/* What all users need is shared by uid: slots, fetches. The rule is that of shares.py: after taking a place an owner has at
 * most three times what is left free. One owner alone gets three quarters of all places, the next one three quarters of
 * the rest, and so on (hazard 31). A few owners take nearly everything like that. So there is a reserve besides, of which
 * an owner may take a place as long as it has fewer than LEAST of all: that leaves room for reserve / LEAST more owners.
 *
 * The caller holds the lock of whatever is shared. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define DAEMON_OWNER UINT32_MAX /* work that no user waits for */
#define LEAST 2

struct share {
    uint32_t owner, held;
};

struct shares {
    uint32_t total, reserve; /* places; `total` is without the reserve */
    uint32_t held, places;
    uint32_t count;       /* owners that have something; few, so they are looked through one by one */
    struct share *owners; /* room for `places` */
};

/* `places`: so many may be taken, if need be beyond `total` and `reserve`. False: no memory. */
bool shares_init(struct shares *shares, uint32_t total, uint32_t reserve, uint32_t places);
uint32_t shares_held(const struct shares *shares, uint32_t owner);
/* May this owner have no more? */
bool shares_full(const struct shares *shares, uint32_t owner);
/* Also of full shares: a successor takes over what there is. */
void shares_take(struct shares *shares, uint32_t owner);
void shares_give(struct shares *shares, uint32_t owner);
