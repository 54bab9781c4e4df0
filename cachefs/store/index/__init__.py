"""The index: LMDB tables of inodes, names and extents, and their records.

The only room that imports lmdb.
"""
