"""The blob: one append-only file of records with checksums, and the accounting of its disk space.

`record` is a pure codec.
"""
