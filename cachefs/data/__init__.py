"""The bytes of files: what is cached, how a miss is fetched, written behind, and evicted.

`cachefs.fs` decides which users may read them.
"""
