"""What Python and C share: structs, flags, messages, requests and constants, each defined once.

`python -m cachefs.contract INCLUDES` writes them for C. Standard library and policies only, because the build runs it.
"""
