"""The bytes of files: the cache, fetches of misses, write-behind, and eviction.

`cachefs.fs` decides which users may read them.
"""
