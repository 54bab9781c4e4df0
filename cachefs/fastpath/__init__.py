"""The fast path: a program in C between /dev/fuse and pyfuse3, and how the daemon starts, feeds and outlives it.

docs/FASTPATH.md says what it answers and what happens when either side dies.
"""
