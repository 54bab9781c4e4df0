"""Operating-system services that Python does not wrap: system calls, private files, locks, sockets, clocks.

The bottom layer: it contains nothing about caches.
"""
