"""The directory underneath. Every call to it is made here: counted, limited in number, and with a deadline.

It compares what it opens with index records; it writes none.
"""
