"""A writer on the source swaps objects while a user without rights looks at them through the mount.

The environment variable RACES, 100000 for example, makes it long; --seed repeats a run.
"""

import ctypes
import errno
import os
import random
import stat
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount
from tests.load import fork
from tests.users import open_to_all

MakeMount = Callable[..., Mount]
USER = 1234
NAMES = 16
SECRET, CLOSED, OPEN = b"hidden: of the outside", b"hidden: in a closed directory", b"open to all"
SHUT = b"hidden: of a closed file"
HIDDEN_S = 1_000_000_000
"""When the objects whose attributes the user may not even see were changed last."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
SEEN_IN_TIME_S = 60.0
HUNG_S = 60.0
libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: Path, other: Path) -> None:
    if libc.renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2", str(one))


def a_file(path: Path, content: bytes, mode: int) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def fill_hidden(directory: Path, content: bytes) -> None:
    """Files open to everyone with access to the directory: one of known name, one that only a listing shows."""
    directory.mkdir()
    for name in ("file", "hidden name"):
        a_file(directory / name, content, 0o644)
        os.setxattr(directory / name, "user.hidden", content)
        os.utime(directory / name, (HIDDEN_S, HIDDEN_S))


def make_racers(source: Path, outside: Path) -> None:
    """`top/N` and `top/N.file` are on the paths that the user uses; beside them are the objects that replace them."""
    outside.mkdir()
    fill_hidden(outside / "inner", SECRET)
    os.utime(outside / "inner", (HIDDEN_S, HIDDEN_S))
    outside.chmod(0o700)
    top, away = source / "top", source / "away"
    top.mkdir()
    away.mkdir()
    for number in range(NAMES):
        (top / f"{number}").mkdir()
        a_file(top / f"{number}/file", OPEN, 0o644)
        (away / f"{number}.link").symlink_to(outside / "inner")
        fill_hidden(away / f"{number}.closed", CLOSED)
        (away / f"{number}.closed").chmod(0o700)
        a_file(top / f"{number}.file", OPEN, 0o644)
        (away / f"{number}.file.link").symlink_to(outside / "inner/file")
        a_file(away / f"{number}.file.closed", SHUT, 0o600)
        os.mkfifo(away / f"{number}.file.fifo", 0o666)
        os.mknod(away / f"{number}.file.device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        os.chmod(away / f"{number}.file.fifo", 0o666)
        os.chmod(away / f"{number}.file.device", 0o666)
    away.chmod(0o700)


def swap(source: Path, races: int, seed: int, stop: Event, results: Any) -> None:
    """Swap at least that often, and until the event to stop."""
    draw = random.Random(seed)
    top, away = source / "top", source / "away"
    done = 0
    while done < races or not stop.is_set():
        number = draw.randrange(NAMES)
        name = draw.choice((f"{number}", f"{number}.file"))
        others = ("link", "closed") if name == f"{number}" else ("link", "closed", "fifo", "device")
        exchange(top / name, away / f"{name}.{draw.choice(others)}")
        done += 1
        if done == races:
            results.put(("swapped", done))
    results.put(("swaps", done))


def look(top: Path, seed: int, stop: Event, results: Any) -> None:
    """Look as a user without rights; return how often each object was seen, and what is not open to all."""
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    leaked: list[str] = []

    def read(path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, 100)
        finally:
            os.close(fd)

    def kind(path: Path) -> os.stat_result:
        found = os.lstat(path)
        seen[f"is {stat.S_IFMT(found.st_mode):o} {found.st_mode & 0o777:o}"] += 1
        return found

    def entries(path: Path) -> list[object]:
        with os.scandir(path) as listing:
            return [(entry.name, int(entry.stat().st_mtime) == HIDDEN_S) for entry in listing]

    def is_hidden(answer: object) -> bool:
        if isinstance(answer, os.stat_result):
            return int(answer.st_mtime) == HIDDEN_S
        if isinstance(answer, bytes) and answer and not answer.strip(b"\0"):
            return True  # a device
        return "hidden" in repr(answer) or "True" in repr(answer)

    ways: tuple[Callable[[Path], object], ...] = (
        read,
        kind,
        os.listdir,
        os.stat,
        os.readlink,
        lambda path: [os.getxattr(path, name) for name in os.listxattr(path)],
        lambda path: os.getxattr(path, "user.hidden"),
        entries,
    )
    while not stop.is_set():
        number = draw.randrange(NAMES)
        path = top / draw.choice((f"{number}", f"{number}/file", f"{number}.file"))
        way = draw.choice(ways)
        try:
            answer = way(path)
            if is_hidden(answer):
                leaked.append(f"{path}: {answer!r}")
            result = "open" if answer == OPEN else "done"
        except OSError as error:
            result = errno.errorcode[error.errno or 0]
        seen[result] += 1
        if sum(seen.values()) % 500 == 0:
            results.put(("seen", dict(seen), leaked))
    results.put(("saw", dict(seen), leaked))


EXPECTED = {
    "is 40000 755": "a directory",
    "is 40000 700": "a closed directory",
    "is 120000 777": "a symlink",
    "is 100000 644": "a file",
    "is 100000 600": "a closed file",
    "is 10000 666": "a FIFO",
    "is 20000 666": "a device",
    "open": "what is open to all",
    "EACCES": "a refusal",
}
MAY_BE = {"done", "EINVAL", "EISDIR", "ELOOP", "ENODATA", "ENOENT", "ENOTDIR", "ENXIO", "EOPNOTSUPP", "ESTALE"}


@pytest.mark.promise("PE-2")
@pytest.mark.parametrize("arguments", [(), ("--mutable", "**"), ("--read-only",)], ids=["", "mutable", "read-only"])
def test_what_is_swapped_at_the_source_shows_a_user_nothing_that_is_not_theirs(
    mount: MakeMount,
    source: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    random_seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    races = int(os.environ.get("RACES", "2000"))
    os.umask(0o022)
    make_racers(source, tmp_path / "outside")
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    (tmp_path / "outside").chmod(0o700)
    swaps, looks = fork.Queue(), fork.Queue()
    stop = fork.Event()
    writer = fork.Process(target=swap, args=(source, races, random_seed, stop, swaps))
    reader = fork.Process(target=look, args=(m.path / "top", random_seed + 1, stop, looks))
    for process in (writer, reader):
        process.start()
    try:
        assert swaps.get(timeout=SEEN_IN_TIME_S + races / 100)[1] == races
        deadline = time.monotonic() + SEEN_IN_TIME_S
        seen: dict[str, int] = {}
        while not EXPECTED.keys() <= seen.keys():
            assert time.monotonic() < deadline, f"not seen: {EXPECTED.keys() - seen.keys()} of {seen}"
            _, seen, leaked = looks.get(timeout=HUNG_S)
            assert not leaked
        stop.set()
        done = swaps.get(timeout=HUNG_S)[1]
        told = "seen"
        while told != "saw":
            told, seen, leaked = looks.get(timeout=HUNG_S)
        assert not leaked
        with capsys.disabled():
            print(f"\n--seed {random_seed}: {done} swaps, {dict(sorted(seen.items()))}")
    finally:
        for process in (writer, reader):
            process.join(1)
            if process.exitcode is None:
                process.kill()
                process.join(10)
    assert m.status()["pid"] == m.pid
    assert set(seen) - set(EXPECTED) <= MAY_BE
