"""A power cut at any moment leaves a cache that mounts, and that serves no wrong byte."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.options import MIB, Options, Revalidate
from cachefs.store import recovery
from cachefs.store.cache_directory import CacheDirectory
from cachefs.store.runs import last_run, run_of
from tests.conftest import Mount, cachefs, contents, make_files, settle
from tests.crash import recorder
from tests.crash.states import Log
from tests.crash.survivors import check_mounted, in_process

MakeMount = Callable[..., Mount]
LRU_BYTES = 8 * MIB
POINTS_A_MOUNT = 16
"""Of so many power cuts one more is checked on a real mount."""
LOST_INDEX_SHARE = 0.15
ROUNDS = 3
LARGE_BYTES = 5_000_000

CAMPAIGNS: dict[str, tuple[tuple[str, ...], Options]] = {
    "read-write": ((), Options(fastpath=False)),
    "read-only": (("--read-only",), Options(fastpath=False, read_only=True, attr_timeout_s=float("inf"))),
    "lru": (
        ("--retention", "lru", "--cache-size", "8M"),
        Options(fastpath=False, retention="lru", cache_size_bytes=LRU_BYTES),
    ),
    "snapshot": (("--read-only",), Options(fastpath=False, read_only=True, attr_timeout_s=float("inf"))),
}


def read_some(m: Mount, draw: random.Random, paths: list[Path]) -> None:
    for path in draw.sample(paths, len(paths) // 2):
        assert (m.path / path).read_bytes() == (m.source / path).read_bytes()
    for name in draw.sample(sorted(os.listdir(m.source)), 2):
        if (m.path / name).is_dir():
            os.listdir(m.path / name)


def change_some(m: Mount, draw: random.Random, number: int, paths: list[Path]) -> None:
    """Names and files, through the mount and behind its back."""
    new = m.path / "d1" / f"new{number}"
    new.write_bytes(draw.randbytes(draw.randint(1, 100_000)))
    new.rename(m.path / "d2" / f"renamed{number}")
    gone, rewritten, moved = draw.sample(paths, 3)
    (m.path / gone).unlink()
    paths.remove(gone)
    (m.source / rewritten).write_bytes(draw.randbytes(draw.randint(1, 50_000)))
    cachefs("invalidate", m.path / rewritten)
    (m.path / moved).rename(m.path / moved.with_name(f"moved{number}"))
    paths[paths.index(moved)] = moved.with_name(f"moved{number}")


def live(m: Mount, draw: random.Random, paths: list[Path]) -> None:
    """Two runs on one cache directory, with kills in the first, and changes unless it is read-only."""
    for number in range(ROUNDS):
        read_some(m, draw, paths)
        if "--read-only" not in m.arguments:
            change_some(m, draw, number, paths)
        if number % 2:
            m.flush()
        if number == 1 and m.status()["fastpath"]:
            m.killed_fastpaths += 1
            os.kill(int(m.status()["fastpath"]["pid"]), signal.SIGKILL)
        if number == 2:
            m.kill()
            m.start()
    settle()  # what was just changed is compared once more, and then pinned
    read_some(m, draw, paths)
    m.umount()
    m.start()
    contents(m.path)
    m.umount()


def test_a_first_mount_that_was_cut_off_anywhere_can_be_made_again(mount: MakeMount, tmp_path: Path) -> None:
    source, directory, written = tmp_path / "source", tmp_path / "recorded", tmp_path / "log"
    make_files(source, 1)
    (source / "fresh").mkdir()
    with recorder.recording(recorder.build(tmp_path), directory, written):
        mount(source, cache=directory).kill()
    log = Log(recorder.entries(written, directory))
    with in_process(source) as survivors:
        for moment in range(len(log) + 1):
            place = tmp_path / f"{moment}"
            place.mkdir()
            log.leave(moment, random.Random(moment), place / "cache")
            survivors.check(place, Options(fastpath=False), lost_index=False)
            shutil.rmtree(place)


@pytest.mark.promise("CH-22")
def test_a_rebuild_that_was_cut_off_anywhere_leads_to_no_run_number_twice(
    mount: MakeMount, source: Path, tmp_path: Path
) -> None:
    directory, written = tmp_path / "recorded", tmp_path / "log"
    with recorder.recording(recorder.build(tmp_path), directory, written):
        m = mount(source, cache=directory)
        contents(m.path)
        m.flush()
        m.umount()
        before = len(recorder.entries(written, directory))
        subprocess.run(["rm", "-r", directory / "index"], check=True)
        m.start()
        m.umount()
    log = Log(recorder.entries(written, directory))
    for moment in range(before, len(log) + 1):
        place = tmp_path / f"{moment}"
        log.leave(moment, random.Random(moment), place)
        cache = CacheDirectory(place, str(source))
        blob = cache.open_blob()
        durable = cache.open_durable(blob)
        last = last_run(durable)
        versions = [run_of(header.version) for header, _ in recovery.scan(blob)]
        assert versions and last is not None and last.run >= max(versions), f"{moment} of {before} to {len(log)}"
        durable.close()
        blob.close()
        cache.close()
        shutil.rmtree(place)


@pytest.mark.slow
@pytest.mark.promise("TE-2", "CH-19")
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_power_cut_leaves_a_cache_that_mounts_and_serves_no_wrong_byte(
    mount: MakeMount, tmp_path: Path, pytestconfig: pytest.Config, random_seed: int, name: str
) -> None:
    arguments, options = CAMPAIGNS[name]
    points = max(pytestconfig.getoption("--crash-points") // len(CAMPAIGNS), 1)
    mounts = max(points // POINTS_A_MOUNT, 1)
    draw = random.Random(random_seed)
    source, directory, written = tmp_path / "source", tmp_path / "recorded", tmp_path / "log"
    paths = make_files(source, 60, (1, 60_000))
    for number in range(2):
        paths.append(Path(f"large{number}"))
        (source / paths[-1]).write_bytes(draw.randbytes(LARGE_BYTES))
    (source / "fresh").mkdir()
    settle()
    if name == "snapshot":
        exporter = mount(source, "--read-only", name="exporter")
        cachefs("warmup", exporter.path, "--metadata-only")
        cachefs("snapshot", "export", exporter.path, tmp_path / "snapshot")
        exporter.umount()
        arguments = (*arguments, "--metadata-snapshot", str(tmp_path / "snapshot"))
    with recorder.recording(recorder.build(tmp_path), directory, written):
        live(mount(source, *arguments, cache=directory), draw, paths)
    log = Log(recorder.entries(written, directory))
    _check_replay(log, directory, tmp_path / "whole")
    began, lost = time.monotonic(), 0
    with in_process(source) as survivors:
        for number in range(points):
            point = random.Random(f"{random_seed}-{number}")
            moment, place = log.draw_moment(point), tmp_path / f"point{number}"
            place.mkdir()
            log.leave(moment, point, place / "cache")
            lost_index = point.random() < LOST_INDEX_SHARE
            lost += lost_index
            revalidate = point.choice([Revalidate.LAZY, Revalidate.NEVER])
            where = f"--seed {random_seed}: point {number} of {name}, {moment} of {len(log)} entries, {revalidate}"
            try:
                survivors.check(place, replace(options, revalidate=revalidate), lost_index=lost_index)
            except BaseException as error:
                error.add_note(f"{where}{', without an index' * lost_index}; left in {place}")
                raise
            shutil.rmtree(place)
    assert survivors.hits > points, "what was left was never used"
    for number in range(mounts):
        point = random.Random(f"{random_seed}-mounted-{number}")
        place = tmp_path / f"mounted{number}"
        moment = log.draw_moment(point)
        log.leave(moment, point, place)
        lost_index = point.random() < LOST_INDEX_SHARE
        if lost_index:
            shutil.rmtree(place / "index", ignore_errors=True)
        revalidate = point.choice(["lazy", "never"])
        print(f"mount {number}: {moment} of {len(log)} entries, {revalidate}, {place}")
        m = mount(source, *arguments, "--revalidate", revalidate, cache=place, name=f"mnt{number}")
        check_mounted(m, lost_index=lost_index)
        shutil.rmtree(place)
    print(f"{name}: {points} power cuts in {len(log):,} entries, {lost} without an index, {mounts} on real mounts: "
          f"no wrong byte, no failed mount, {survivors.hits:,} hits, {time.monotonic() - began:.0f} s")  # fmt: skip


def _check_replay(log: Log, recorded: Path, place: Path) -> None:
    """Nothing was written past the recorder: all of the log gives the directory that there is."""

    class Everything(random.Random):
        def random(self) -> float:
            return 0.0

        def choice(self, possible):  # type: ignore[no-untyped-def]
            return possible[1]

    log.leave(len(log), Everything(), place)
    found, expected = _files(place), _files(recorded)
    assert found.keys() == expected.keys()
    for path, content in expected.items():
        assert found[path] == content, path
    shutil.rmtree(place)


def _files(root: Path) -> dict[Path, bytes]:
    """A hole is as good as zeros, and a blob of a few slabs is small enough to read."""
    return {path: content for path, content in contents(root).items() if path.name not in recorder.NOT_KEPT}
