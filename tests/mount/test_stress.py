"""Several processes make all calls of a job at once; results are compared with the source all the time."""

import concurrent.futures
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, make_files, settle, wait_for

pytestmark = pytest.mark.full_age  # files are read while they are written

MakeMount = Callable[..., Mount]
WORKERS = 8
LARGE_FILES, LARGE_BYTES = 3, 9_000_000
FAST_PATH_BYTES = 32 << 20


def work(mountpoint: Path, source: Path, worker: int, until: float) -> dict[str, int]:
    """Random operations in a directory for each process, and reads of shared files."""
    draw = random.Random(worker)
    own, beneath = mountpoint / f"worker{worker}", source / f"worker{worker}"
    own.mkdir()
    model: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    shared = sorted(p.relative_to(source) for p in (source / "shared").rglob("f*"))
    fresh = 0
    while time.monotonic() < until:
        action = draw.choice(
            ["write", "append", "read", "mmap", "rename", "unlink", "list", "stat", "shared", "shared", "link", "jump"]
        )
        counts[action] = counts.get(action, 0) + 1
        name = draw.choice(sorted(model)) if model else None
        if action == "shared":
            path = draw.choice(shared)
            assert (mountpoint / path).read_bytes() == (source / path).read_bytes(), path
        elif action == "write" or name is None:
            fresh += 1
            name = f"file{fresh % 40}"
            content = draw.randbytes(draw.choice([0, 10, 5000, 200_000]))
            (own / name).write_bytes(content)
            model[name] = content
        elif action == "append":
            with open(own / name, "ab") as file:
                file.write(b"more")
            model[name] += b"more"
            assert (own / name).stat().st_size == len(model[name])
        elif action == "read":
            assert (own / name).read_bytes() == model[name] == (beneath / name).read_bytes()
        elif action == "mmap":
            path = draw.choice(shared)
            with (
                open(mountpoint / path, "rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
            ):
                at = draw.randrange(len(mapped))
                assert mapped[at : at + 9000] == (source / path).read_bytes()[at : at + 9000], path
        elif action == "jump":
            path = Path("shared", f"large{draw.randrange(LARGE_FILES)}")
            with open(mountpoint / path, "rb") as file, open(source / path, "rb") as expected:
                for _ in range(5):
                    at, length = draw.randrange(LARGE_BYTES), draw.choice([1, 5000, 200_000, 3_000_000])
                    assert os.pread(file.fileno(), length, at) == os.pread(expected.fileno(), length, at), (path, at)
        elif action == "rename":
            other = f"file{draw.randrange(40)}"
            os.rename(own / name, own / other)
            model[other] = model.pop(name)
        elif action == "unlink":
            (own / name).unlink()
            del model[name]
        elif action == "list":
            assert sorted(os.listdir(own)) == sorted(model) == sorted(os.listdir(beneath))
        elif action == "stat":
            assert (own / name).stat().st_size == len(model[name])
            assert not (own / "absent").exists()
        elif action == "link":
            other = f"file{draw.randrange(40)}"
            if other not in model:
                os.link(own / name, own / other)
                model[other] = model[name]
                (own / name).unlink()
                del model[name]
    assert {p.name: p.read_bytes() for p in own.iterdir()} == model
    return counts


def resources(pid: int) -> tuple[int, int]:
    """(open descriptors, bytes of anonymous memory)"""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
    return len(os.listdir(f"/proc/{pid}/fd")), anonymous


@pytest.mark.slow
def test_many_processes_at_once(mount: MakeMount, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seconds = pytestconfig.getoption("--stress-seconds") or 25
    source = tmp_path / "busy"
    make_files(source / "shared", 300, (1, 150_000))
    for number in range(LARGE_FILES):
        (source / "shared" / f"large{number}").write_bytes(random.Random(number).randbytes(LARGE_BYTES))
    settle()
    m = mount(source, "--attr-timeout", "0.5")
    processes = [m.pid, *([m.status()["fastpath"]["pid"]] if m.status()["fastpath"] else [])]
    started = time.monotonic()
    until = started + seconds
    early: list[tuple[int, int]] = []
    with concurrent.futures.ProcessPoolExecutor(WORKERS) as pool:
        running = [pool.submit(work, m.path, source, worker, until) for worker in range(WORKERS)]
        generation = 0
        while time.monotonic() < until:
            generation += 1
            if generation % 2:
                m.drop_caches()
            else:
                for name in (f"d{generation % 4}", f"large{generation // 2 % LARGE_FILES}"):
                    cachefs("invalidate", m.path / "shared" / name, check=False)
            if not early and time.monotonic() > started + seconds / 3:
                m.flush()
                early = [resources(pid) for pid in processes]
            time.sleep(0.5)
        totals = [future.result() for future in running]
    assert min(sum(counts.values()) for counts in totals) > 100
    status = m.flush()
    assert status["errors"] == 0 and status["stale_reads"] == 0
    for pid in processes[1:]:  # what a burst of misses took is given back after a second
        wait_for(lambda pid=pid: resources(pid)[1], lambda anonymous: anonymous < FAST_PATH_BYTES)
    late = [resources(pid) for pid in processes]
    print(f"{sum(sum(counts.values()) for counts in totals):,} operations in {seconds} s; descriptors and RssAnon: "
          f"{early} after a third, {late} at the end")  # fmt: skip
    for (descriptors, anonymous), (descriptors_then, anonymous_then) in zip(late, early, strict=True):
        # Files are open at either moment, a dozen at most; what the allocator keeps may grow to its bound.
        assert descriptors <= descriptors_then + 20
        assert anonymous <= 1.25 * anonymous_then + (16 << 20)
    assert late[0][1] < 250 << 20
