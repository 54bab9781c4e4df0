"""Claims: one holder at a time, and nothing stays behind."""

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cachefs.system import claims
from cachefs.system.claims import Claim, Taken, lock_for_good


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = Claim.take(tmp_path, "a")
    with pytest.raises(Taken) as caught:
        Claim.try_to_take(tmp_path, "a")
    assert caught.value.pid == str(os.getpid())
    other = Claim.take(tmp_path, "b")
    first.release()
    first.release()  # once is enough
    again = Claim.try_to_take(tmp_path, "a")
    assert sorted(os.listdir(tmp_path)) == ["lock-a", "lock-b"]
    other.release()
    again.release()
    assert os.listdir(tmp_path) == []


def test_a_child_may_release_what_its_parent_took(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path, "a")
    if (child := os.fork()) == 0:
        claim.release()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    Claim.try_to_take(tmp_path, "a").release()
    claim.release()


def test_what_a_killed_process_held_is_free_and_its_file_removed(tmp_path: Path) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        Claim.take(tmp_path, "a")
        Claim.take(tmp_path, "b")
        os.write(write, b"x")
        signal.pause()
    assert os.read(read, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    claim = Claim.try_to_take(tmp_path, "a")
    assert os.listdir(tmp_path) == ["lock-a"]  # nor is anything left of b
    claim.release()
    for fd in (read, write):
        os.close(fd)


def test_the_lock_on_a_file_that_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    first = lock_for_good(path)[0]
    with pytest.raises(Taken) as caught:
        lock_for_good(path)
    assert caught.value.pid == str(os.getpid())
    os.close(first)
    os.close(lock_for_good(path)[0])
    # A zombie, and another process that keeps its descriptor open as one of its threads in the kernel would.
    read, write = os.pipe()
    gate, gate_end = os.pipe()
    if (zombie := os.fork()) == 0:
        lock_for_good(path)
        os.write(write, b"x")
        if os.fork() == 0:
            os.close(gate_end)
            os.read(gate, 1)
        os._exit(0)
    assert os.read(read, 1) == b"x"
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    assert str(zombie) in children.read_text().split()
    mine = lock_for_good(path)[0]
    with pytest.raises(Taken):
        lock_for_good(path)
    os.close(mine)
    os.waitpid(zombie, 0)
    for fd in (read, write, gate, gate_end):
        os.close(fd)


@pytest.mark.promise("FA-42")
def test_a_lock_names_killed_processes_that_have_not_ended_when_a_later_one_has(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    if (zombie := os.fork()) == 0:
        os._exit(0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    path.write_text(f"{zombie} {claims._started(str(zombie))}\n")
    for _ in range(2):
        fd, dying = lock_for_good(path)
        assert dying == [zombie]
        os.close(fd)
    os.waitpid(zombie, 0)
    fd, dying = lock_for_good(path)
    assert dying == []
    os.close(fd)


def test_a_full_disk_does_not_prevent_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Btrfs needs a new block to overwrite the line of the last process."""

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    fd = lock_for_good(tmp_path / "lock")[0]
    with pytest.raises(Taken):
        lock_for_good(tmp_path / "lock")
    os.close(fd)


def test_a_lock_is_free_when_its_process_ends_while_the_lock_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a mount right after an unmount could be refused."""
    path = tmp_path / "lock"
    (gone := subprocess.Popen(["true"])).wait()
    path.write_text(f"{gone.pid} 1\n")
    answers = iter((False, True))
    monkeypatch.setattr(claims, "try_to_lock", lambda fd: next(answers))
    os.close(lock_for_good(path)[0])
    assert path.read_text().startswith(f"{os.getpid()} ")
