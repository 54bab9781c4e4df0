"""Log lines, for people and for the journal."""

import os
import subprocess
import sys
from pathlib import Path

from daemon.service.background import LOG_BYTES, LOG_FILES
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


FILL = """
import logging, sys
from pathlib import Path
from daemon.service import background
background.log_to_file(Path(sys.argv[1]), "info")
for number in range(int(sys.argv[2])):
    logging.getLogger("x").info("%d %s", number, "x" * 10_000)
"""


def test_log_files_have_a_limit(tmp_path: Path) -> None:
    """Over several daemons, too: each continues the file of the last one."""
    count = LOG_FILES * LOG_BYTES // 10_000
    for _ in range(2):
        command = [sys.executable, "-c", FILL, tmp_path / "daemon.log", str(count)]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        files = sorted(tmp_path.iterdir())
        assert [path.name for path in files] == ["daemon.log", "daemon.log.1"]
        assert all(path.stat().st_size <= LOG_BYTES and path.stat().st_mode & 0o777 == 0o600 for path in files)
        with open(files[0], encoding="utf-8") as last:  # nothing is lost between the two
            *_, line = last
        assert f" {count - 1} xxx" in line
    assert sum(path.stat().st_size for path in files) > LOG_BYTES
