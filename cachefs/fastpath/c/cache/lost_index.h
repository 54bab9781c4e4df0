/* An index on a disk that fails: pages that the disk does not give are replaced, and nothing more is read of it.
 * unreadable.py has the same rule, and the reasons. */
#pragma once

#include <stdbool.h>

#include "common/shared.h"

/* Call it before an index is opened: LMDB writes to its table of readers then. False: not possible, errno is set. */
bool lost_index_watch(struct shared *shared);

/* Forget what was just read of the index, and read no more of it: `serving` is 0. */
bool index_is_lost(void);
