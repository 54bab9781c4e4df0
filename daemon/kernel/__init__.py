"""What the daemon asks of the kernel: /dev/fuse, mounts, mount instances, the mounted source.

Nothing of the filesystem itself.
"""
