"""Counters and latency histograms: their names, units and meanings.

They are incremented on the trio thread alone.
"""
