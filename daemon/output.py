"""Lines of text that the command line prints. Tables are in display.py; JSON escapes names itself."""

import click

from cachefs.printable import one_line


def say(line: str, *, err: bool = False) -> None:
    """Print one line, with unsafe characters in names escaped."""
    click.echo(one_line(line), err=err)
