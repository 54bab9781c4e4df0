"""What is known of inodes and names, and for how long it is valid.

Decisions on index records; no call to the source.
"""
