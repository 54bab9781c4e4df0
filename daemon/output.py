"""What the command line says to people, one line at a time. Tables are in display.py, and JSON needs no escaping."""

import click

from cachefs.printable import one_line


def say(line: str, *, err: bool = False) -> None:
    """Print one line, whatever names are in it."""
    click.echo(one_line(line), err=err)
