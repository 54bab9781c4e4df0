"""Names that anybody may have chosen, in text for people (B8)."""

import io
import logging
from pathlib import Path

import pytest

from cachefs.printable import one_line
from daemon.service import background


@pytest.mark.promise("PE-17")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name.txt", "plain name.txt"),
        ("Grüße, 世界", "Grüße, 世界"),
        ("a\nb\r\tc\x00", r"a\x0ab\x0d\x09c\x00"),
        ("\x1b[2J\x9b31m\x7f", r"\x1b[2J\x9b31m\x7f"),
        (b"\xff\x1b", r"\xff\x1b"),
        ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
        ("turned \u202egpj.exe", r"turned \u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("", ""),
    ],
)
def test_b8_a_name_is_one_line_and_commands_nothing(name: str | bytes, shown: str) -> None:
    assert one_line(name) == shown
    one_line(name).encode()  # no half of a surrogate pair is left


@pytest.mark.promise("PE-17")
def test_b8_a_name_forges_no_line_of_the_log(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.raiseExceptions
    try:
        background.log_to_file(tmp_path / "log", "info")
        logging.getLogger("cachefs.x").warning("warm-up: %s", "f\n2026-01-01 ERROR daemon: forged \x1b[31m")
        try:
            raise OSError("x\x1b[31m")
        except OSError:
            logging.getLogger("cachefs.x").exception("bug in %s", "a\nb")
        for handler in root.handlers:
            handler.close()
    finally:
        root.handlers[:], logging.raiseExceptions = before[0], before[2]
        root.setLevel(before[1])
    lines = (tmp_path / "log").read_text().splitlines()
    assert r"warm-up: f\x0a2026-01-01 ERROR daemon: forged \x1b[31m" in lines[0]
    assert lines[1].endswith(r"bug in a\x0ab") and lines[2] == "Traceback (most recent call last):"
    assert r"OSError: x\x1b[31m" in lines[-1]


@pytest.mark.promise("PE-17")
def test_b8_a_name_forges_no_line_on_stderr() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "%s", ("a\n<3>forged",), None)
    for formatter in (background._Journal(), background._Lines(background.SHORT_FORMAT)):
        assert len(io.StringIO(formatter.format(record)).readlines()) == 1
