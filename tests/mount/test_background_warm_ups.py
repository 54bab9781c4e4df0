"""Warm-ups in the background: listed, awaited, cancelled."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Mount, cachefs, wait_for
from tests.mount.test_cli import refused
from tests.processes import start

MakeMount = Callable[..., Mount]


def test_background_warm_ups_are_listed_awaited_and_cancelled(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "2m")
    for path in m.path.rglob("*"):
        path.lstat()  # pinned: a listing would not wait for a name that hangs
    (faults / "hang").write_text("f00001")
    begun = json.loads(cachefs("warmup", m.path / "d1", m.path / "d0", "--background", "--json").stdout)
    assert begun == [{"mountpoint": str(m.path), "id": 1}]
    cachefs("warmup", m.path / "d1", "--background")
    listed = cachefs("warmup", "--list", m.path).stdout.splitlines()
    assert len(listed) == 2 and listed[0].endswith(" d1, d0") and listed[1].startswith(f"{m.path}: warm-up 2: ")
    waiting = start("warmup", "--wait", "--id", "1", m.path, "--json")
    cachefs("warmup", "--cancel", "--id", "2", m.path)
    (left,) = wait_for(
        lambda: json.loads(cachefs("warmup", "--list", m.path, "--json").stdout), lambda found: len(found) == 1
    )
    assert left["id"] == 1 and waiting.poll() is None
    assert "warm-up 2 was cancelled, or failed" in refused("warmup", "--wait", "--id", "2", m.path)
    (faults / "hang").unlink()
    said, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and json.loads(said)["cached_files"] == 20, (said, errors, m.log())
    assert json.loads(cachefs("warmup", "--wait", "--id", "1", m.path, "--json").stdout)["is_complete"]  # it has ended
    assert "has ended already" in refused("warmup", "--cancel", "--id", "1", m.path)
    assert "there is no warm-up 9" in refused("warmup", "--cancel", "--id", "9", m.path)
    assert cachefs("warmup", "--wait", m.path).stdout == "no warm-up runs in the background\n"
    (faults / "hang").write_text("f00002")
    for _ in range(2):
        cachefs("warmup", m.path / "d2", "--background")
    said = cachefs("warmup", "--cancel", m.path).stdout
    assert said == "".join(f"{m.path}: warm-up {number} cancelled\n" for number in (3, 4))
    (faults / "hang").unlink()


def test_waiting_tells_of_a_warm_up_that_has_ended(mount: MakeMount, source: Path) -> None:
    """Before: `--wait` said that none runs, with 0, and a script went on with an incomplete cache."""
    m = mount(source, "--read-only")
    (m.path / "d0/f00000").lstat()
    (source / "d0/f00000").rename(source / "d0/other")
    cachefs("warmup", m.path / "d0/f00000", "--background")
    wait_for(m.status, lambda status: status["ended_warm_ups"])
    done = cachefs("warmup", "--wait", m.path, check=False)
    assert done.returncode == 1 and done.stdout.startswith("0 of 1 files cached (0.0 %)"), done
    assert cachefs("warmup", "--wait", m.path).stdout == "no warm-up runs in the background\n"
