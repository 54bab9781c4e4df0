"""The daemon's interface to the kernel: /dev/fuse, mounts, mount instances, the mounted source.

Nothing of the filesystem itself.
"""
