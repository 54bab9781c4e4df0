"""The process: command line, life cycle, control socket. The filesystem is in `cachefs`."""

DISTRIBUTION = "cachefs"
"""Distinguishes this package from that of python-daemon, which has the same name (daemon/cli/mount.py)."""
