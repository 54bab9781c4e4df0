"""The process: command line, life cycle, control socket. The filesystem is in `cachefs`."""

DISTRIBUTION = "cachefs-ml"
"""What `pip install` calls cachefs: `cachefs` on PyPI is another program. Also distinguishes this package from that of
python-daemon, which has the same name (daemon/cli/mount.py)."""
