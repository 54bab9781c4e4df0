"""Names, mountpoints and arguments with bytes that are not UTF-8, such as names in latin-1."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.client.client import Client
from daemon.cli.main import main
from tests.conftest import Mount, cachefs, contents, mounted_on, settle

MakeMount = Callable[..., Mount]
pytestmark = pytest.mark.promise("PE-20")
LATIN = os.fsdecode("größe".encode("latin-1"))
WITHOUT_A_MOUNT = {"simulate", "graph"}
"""Commands that are tried in the other test. `trace` ends with its job: tests/mount/test_trace.py."""


@pytest.fixture
def named(source: Path) -> Path:
    """A source whose path and names are not UTF-8."""
    moved = source.rename(source.with_name(f"{source.name}-{LATIN}"))
    (moved / LATIN).mkdir()
    (moved / LATIN / f"file-{LATIN}").write_text("a file")
    settle()
    return moved


@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "read-write"])
def test_every_command_takes_every_byte(mount: MakeMount, named: Path, tmp_path: Path, read_only: bool) -> None:
    """Regression: a cache directory of such a name was refused, and `restart` ended with a traceback."""
    cache = tmp_path / f"cache-{LATIN}"
    options = ["--read-only", "--metrics", tmp_path / f"socket-{LATIN}"] if read_only else []
    m = mount(named, *options, "--mutable", f"*.{LATIN}", name=f"mnt-{LATIN}", cache=cache)
    assert contents(m.path) == contents(named)
    directory, file, snapshot = m.path / LATIN, m.path / LATIN / f"file-{LATIN}", tmp_path / f"snapshot-{LATIN}"
    tries: list[tuple[object, ...]] = [
        ("status", m.path), ("status", m.path, "--json"), ("config", "show", m.path), ("info", file),
        ("info", directory), ("warmup", directory), ("warmup", m.path, "--check"), ("pin", file), ("evict", directory),
        ("invalidate", file),
        ("invalidate", m.path / f"missing-{LATIN}"), ("verify", m.path), ("gc", "--root", m.cache),
    ]  # fmt: skip
    tries += [("snapshot", "export", m.path, snapshot), ("doctor", m.path)] if read_only else [("unpin", file)]
    if not m.no_fastpath:
        tries.append(("restart", m.path))
    for arguments in tries:
        done = cachefs(*arguments, check=arguments[0] != "doctor")  # it may have advice for this machine
        assert "Traceback" not in done.stderr and "internal error" not in done.stderr
        done.stdout.encode()  # text: unsafe bytes are escaped
    m.pid = int(m.status()["pid"])
    assert m.status()["mountpoint"] == str(m.path)
    assert contents(m.path) == contents(named)
    if not m.no_fastpath:
        m.kill()
        assert cachefs("status", m.path, check=False).returncode == 1
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        assert os.listdir(m.path / LATIN) == [f"file-{LATIN}"]
    Client(m.path).will_read([file])
    cachefs("umount", m.path)
    m.pid = 0
    tried = {str(arguments[0]) for arguments in tries} | {"mount", "umount"}
    others = {"snapshot", "doctor"} if not read_only else {"unpin"}
    assert set(main.commands) - tried - others - WITHOUT_A_MOUNT - {"trace"} <= (
        {"restart"} if m.no_fastpath else set()
    )
    if read_only:
        other = mount(named, "--read-only", "--metadata-snapshot", snapshot, name=f"other-{LATIN}")
        assert contents(other.path) == contents(named)


def test_refused_arguments_are_one_line(named: Path, tmp_path: Path) -> None:
    place = tmp_path / f"mnt-{LATIN}"
    for arguments in (
        ("mount", named, place / "deeper"),
        ("mount", named / f"missing-{LATIN}", place),
        ("mount", named, place, "--cache-dir", named / f"cache-{LATIN}"),
        ("mount", named, place, "--metadata-snapshot", tmp_path / LATIN, "--read-only", "--cache-dir", tmp_path / "c"),
        ("status", place), ("restart", place), ("umount", place), ("info", place), ("warmup", place),
        ("simulate", tmp_path / LATIN), ("graph", "build", tmp_path / LATIN, tmp_path / f"graph-{LATIN}"),
        ("config", "check", tmp_path / LATIN),
    ):  # fmt: skip
        done = cachefs(*arguments, check=False)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done
        assert done.returncode == 2 or done.stderr.count("\n") == 1, done
    assert not mounted_on(place)
