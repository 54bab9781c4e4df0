"""`python -m daemon` is `cachefs`."""

from daemon.cli.main import main

main(prog_name="cachefs")
