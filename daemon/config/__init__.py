"""What a mount was told: options, the configuration file, where each value comes from.

`config` keeps them for the next daemon.
"""
