"""Log lines, for people and for the journal."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

SCRIPT = """
import logging
from daemon.service import background
background.log_to_stderr("info")
log = logging.getLogger("x")
log.debug("no"); log.info("what"); log.warning("two\\nlines"); log.error("bad")
logging.getLogger().setLevel("ERROR")
log.info("no"); log.error("worse")
"""


def said(tmp_path: Path, *, journal: bool) -> str:
    with open(tmp_path / "stderr", "w+") as stderr:
        found = os.fstat(stderr.fileno())
        stream = f"{found.st_dev}:{found.st_ino}" if journal else "1:1"
        environment = os.environ | {"JOURNAL_STREAM": stream}
        subprocess.run([sys.executable, "-c", SCRIPT], stderr=stderr, env=environment, cwd=REPOSITORY, check=True)
    return (tmp_path / "stderr").read_text()


def test_for_people(tmp_path: Path) -> None:
    expected = "cachefs: what\ncachefs: two\\x0alines\ncachefs: bad\ncachefs: worse\n"
    assert said(tmp_path, journal=False) == expected


def test_for_the_journal(tmp_path: Path) -> None:
    assert said(tmp_path, journal=True) == "<6>what\n<4>two\\x0alines\n<3>bad\n<3>worse\n"
