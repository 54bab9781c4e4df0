"""No replacement: cached objects stay, and objects that do not fit are not cached.

A job that reads every file once per epoch, each time in a new random order, hits a fraction x of its reads with a cache
that holds a fraction x of the data. LRU hits x + (1-x)·ln(1-x), which is 15 % instead of 50 % at x = 0.5: it evicts
what has not been read for the longest time, and that will be read next.
"""

from policies.retention.base import Key, Retention


class NoReplacement(Retention[Key]):
    """The default. It keeps no order, and costs nothing."""
