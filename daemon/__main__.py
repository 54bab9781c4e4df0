"""`python -m daemon` is `cachefs`."""

from daemon.cli import main

main(prog_name="cachefs")
