"""How a mount is configured: its options, the configuration file, and where each value comes from.

`config` stores them for the next daemon.
"""
