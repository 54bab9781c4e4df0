"""Writes the man pages of all commands, from their help. Usage: man_pages.py DIRECTORY [DATE]"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import cachefs
from daemon.cli import mount_helper
from daemon.cli.main import main

Command = tuple[str, ...]
"""Names of groups and of the command, such as ("cachefs", "config", "check")."""
OWN_LINES = "\b"
"""Begins a paragraph that click does not wrap."""


def roff(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga")
    return re.sub(r"^\.", r"\&.", text, flags=re.MULTILINE)


def paragraphs(text: str) -> Iterator[str]:
    """The body of a page, from a docstring."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith(OWN_LINES):
            title, _, rest = paragraph.removeprefix(OWN_LINES).strip("\n").partition("\n")
            yield f"{roff(title)}\n.PP\n{lines_of_their_own(rest)}"
        elif paragraph.startswith("  "):
            yield lines_of_their_own(paragraph)
        else:
            yield roff(" ".join(paragraph.split()))


def lines_of_their_own(text: str) -> str:
    return f".RS 4\n.nf\n{roff(inspect.cleandoc(text))}\n.fi\n.RE"


def summary(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").split("\n\n")[0]
    return re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]


def head(name: str, section: int, date: str) -> str:
    return f'.TH {roff(name).upper()} {section} "{date}" "cachefs {cachefs.__version__}"'


def page(names: Command, command: click.Command, context: click.Context, date: str) -> str:
    title, called = "-".join(names), " ".join(names)
    lines = [head(title, 1, date), ".SH NAME", rf"{roff(title)} \- {roff(summary(command))}"]
    usage = " ".join(command.collect_usage_pieces(context))
    lines += [".SH SYNOPSIS", rf"\fB{roff(called)}\fR {roff(usage)}"]
    lines += [".SH DESCRIPTION", *paragraphs(command.help or "")]
    options = [
        record
        for each in command.get_params(context)
        if isinstance(each, click.Option) and (record := each.get_help_record(context)) is not None
    ]
    if options:
        lines += [".SH OPTIONS", *(f".TP\n\\fB{roff(option)}\\fR\n{roff(text)}" for option, text in options)]
    if isinstance(command, click.Group):
        below = [("-".join([*names, name]), summary(each)) for name, each in members(command)]
        lines += [".SH COMMANDS", *(f".TP\n.BR {roff(name)} (1)\n{roff(text)}." for name, text in below)]
    if len(names) > 1:
        lines += [".SH SEE ALSO", f".BR {roff('-'.join(names[:-1]))} (1)"]
    return "\n".join(lines) + "\n"


def members(group: click.Group) -> list[tuple[str, click.Command]]:
    return sorted((name, each) for name, each in group.commands.items() if not each.hidden)


def pages(names: Command, command: click.Command, above: click.Context | None, date: str) -> Iterator[tuple[str, str]]:
    """(file name, content) of this command and of those below it."""
    with click.Context(command, parent=above, info_name=names[-1], **command.context_settings) as context:
        yield f"man1/{'-'.join(names)}.1", page(names, command, context, date)
        for name, each in members(command) if isinstance(command, click.Group) else []:
            yield from pages((*names, name), each, context, date)


def helper_page(date: str) -> str:
    """Of the program that mount(8) calls."""
    usage, _, rest = inspect.cleandoc(mount_helper.__doc__ or "").partition("\n\n")
    called, _, about = usage.removeprefix("`").partition("`: ")
    name = called.split()[0]
    return "\n".join(
        [
            head(name, 8, date),
            ".SH NAME",
            rf"{name} \- mount a filesystem of type fuse.cachefs",
            ".SH SYNOPSIS",
            roff(called),
            ".SH DESCRIPTION",
            *paragraphs(f"{about}\n\n{rest}"),
            ".SH SEE ALSO",
            ".BR cachefs\\-mount (1),",
            ".BR mount (8),",
            ".BR fstab (5)",
            "",
        ]
    )


def write(directory: Path, date: str) -> None:
    found = dict(pages(("cachefs",), main, None, date))
    found["man8/mount.fuse.cachefs.8"] = helper_page(date)
    for name, text in found.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
