"""Counters and latency histograms, with names, units and meanings.

They are incremented only on the trio thread.
"""
