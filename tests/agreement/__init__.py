"""Rules that both languages have, compared: the fast path is built as a library, and asked the same as Python.

`library.c` has what Python can call, and clocks that stand where a test sets them.
"""
