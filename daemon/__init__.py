"""The process: command line, life cycle, control socket. The filesystem itself is in `cachefs`."""

DISTRIBUTION = "cachefs"
"""python-daemon installs a package named `daemon` too; `daemon.cli.conflict` tells the two apart by this."""
