"""The semantics of names, open files, immutability and changes. docs/SEMANTICS.md is the promise.

No pyfuse3 and no LMDB: it is built and tested without a mount.
"""
