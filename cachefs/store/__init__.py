"""What lies on the local SSD: the cache directory, its index and its blob. docs/FORMAT.md has the bytes.

It knows nothing of the source or of FUSE.
"""
