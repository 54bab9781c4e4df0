"""No replacement: what is in stays in, and what does not fit stays outside.

A job that reads every file once an epoch, each time in a new random order, hits a fraction x of its reads with a cache
that holds a fraction x of the data. LRU hits x + (1-x)·ln(1-x) of them, 15 % instead of 50 % at x = 0.5: what it
throws out is what has not been read for longest, and that is what will be read next.
"""

from policies.retention.base import Key, Retention


class NoReplacement(Retention[Key]):
    """The default. Keeps no order, so it costs nothing."""
