"""The directory underneath: every call to it is made here, counted, bounded and given a deadline.

It compares what it opens with index records; it writes none.
"""
