"""The FUSE adapter: requests of pyfuse3 in, calls of `cachefs.fs` out, and notifications to the kernel.

The only room that imports pyfuse3.
"""
