"""What is known of inodes and names, and for how long it is valid.

Decisions about records of the index; no call to the source.
"""
