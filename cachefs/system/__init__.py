"""What the operating system gives and Python does not wrap: system calls, private files, locks, sockets, clocks.

The bottom layer: it knows nothing of caches.
"""
