"""Prefetching with little room, while files are removed, and with several requesters at once."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.client.client import Client
from tests.conftest import Mount, cachefs, contents, make_files, settle, wait_for
from tests.mount.test_space import read_all

MakeMount = Callable[..., Mount]
MIB = 1 << 20


def report(*arguments: object, check: bool = True) -> dict[str, object]:
    found: dict[str, object] = json.loads(cachefs("warmup", *arguments, "--json", check=check).stdout)
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 small files; no test changes them."""
    root = tmp_path_factory.mktemp("dataset") / "source"
    make_files(root, 200, (1000, 20_000), 4)
    settle()
    return root


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 small files, and a large one that is seen first."""
    root = tmp_path_factory.mktemp("uneven") / "source"
    make_files(root / "small", 40, (1000, 20_000), 1)
    (root / "a").write_bytes(os.urandom(12 * MIB))
    (root / "small" / "d0" / "a").write_bytes(os.urandom(12 * MIB))
    settle()
    return root


@pytest.mark.parametrize("arguments", [(), ("--read-only", "--prefetch", "all")], ids=["read-write", "prefetching"])
def test_several_warm_ups_at_once(mount: MakeMount, dataset: Path, arguments: tuple[str, ...]) -> None:
    m = mount(dataset, *arguments, "--simulate-latency", 0.01)
    with ThreadPoolExecutor(4) as users:
        reports = list(users.map(lambda _: Client(m.path).warm_up([m.path], jobs=2), range(4)))
    assert [found.cached_files for found in reports] == [200] * 4
    assert m.status()["pid"] == m.pid and contents(m.path) == contents(dataset)


@pytest.mark.parametrize("retention", ["lru", "fifo"])
def test_a_cache_that_evicts_and_becomes_small_still_hits(
    mount: MakeMount, dataset: Path, tmp_path: Path, retention: str
) -> None:
    """The room that is kept free follows the size."""
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "10G"\n')
    m = mount(dataset, "--config", file, "--read-only", "--retention", retention)
    file.write_text('cache-size = "20M"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: status["cache_size_bytes"] == 20 * MIB)
    read_all(m.path)
    assert m.flush()["cached_files"] == 200
    read_all(m.path)
    status = wait_for(m.status, lambda status: status["hits"] + status["misses"] >= 400)
    assert status["hits"] == 200 and status["evictions"] == 0


@pytest.mark.promise("CL-12")
@pytest.mark.parametrize(
    "arguments",
    [("--retention", "lru", "--cache-size", "1M"), ("--metadata-limit", "80", "--metadata-retention", "lru"),
     ("--metadata-limit", "80")],
    ids=["lru", "metadata lru", "metadata"],
)  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--metadata-only",)], ids=["data", "metadata-only"])
def test_a_report_says_what_is_cached_in_the_end(
    mount: MakeMount, dataset: Path, arguments: tuple[str, ...], more: tuple[str, ...]
) -> None:
    m = mount(dataset, "--read-only", *arguments)
    done = report(m.path, *more, check=False)
    checked = report(m.path, *more, "--check", check=False)
    assert done["cached_files"] == checked["cached_files"] and done["cached_bytes"] == checked["cached_bytes"]
    complete = arguments[0] == "--retention" and bool(more)
    assert done["is_complete"] == checked["is_complete"] == complete
    assert complete or done["problems"]


@pytest.mark.promise("CL-11")
def test_one_file_that_is_too_large_does_not_end_prefetching(mount: MakeMount, uneven: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "4M"\n')
    m = mount(uneven, "--config", file, "--read-only", "--prefetch", "all")
    status = wait_for(m.status, lambda status: status["prefetch"] == "full" and status["cached_files"] == 40)
    assert status["blob_bytes"] <= 4 * MIB
    file.write_text('cache-size = "40M"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: status["prefetch"] == "idle" and status["cached_files"] == 42)
    assert wait_for(m.status, lambda status: status["blob_bytes"] > 24 * MIB)["misses"] == 0


def test_one_hint_that_is_too_large_takes_none_along(mount: MakeMount, uneven: Path) -> None:
    m = mount(uneven, "--cache-size", "4M")
    Client(m.path).will_read([m.path / "a", *sorted((m.path / "small" / "d0").iterdir())])
    wait_for(m.status, lambda status: status["cached_files"] == 40)


def test_one_file_that_is_too_large_takes_none_along_in_a_warm_up(mount: MakeMount, uneven: Path) -> None:
    m = mount(uneven, "--cache-size", "4M")
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and done.stdout.startswith("40 of 42 files cached")
    assert done.stderr.count("no room in the cache (--cache-size)") == 2
    assert report(m.path, "--check", check=False)["cached_files"] == 40


@pytest.mark.promise("CL-13")
@pytest.mark.parametrize("directories", [1, 250])
def test_a_warm_up_finds_what_the_kernel_forgets_meanwhile(mount: MakeMount, tmp_path: Path, directories: int) -> None:
    """Regression: the record of what was unpinned was dropped, and the report omitted it as if it was removed."""
    source, count = tmp_path / "source", 1000
    make_files(source, count, (1, 100), directories)
    settle()
    m = mount(source, "--simulate-latency", "10")
    looked_at = m.path / "d0" if directories == 1 else m.path
    ended = threading.Event()

    def look_and_forget() -> None:
        while not ended.wait(0.02):
            with os.scandir(looked_at) as entries:
                for entry in entries:
                    entry.stat(follow_symlinks=False)
            m.drop_caches()

    forgetful = threading.Thread(target=look_and_forget)
    forgetful.start()
    try:
        found = report(m.path)
    finally:
        ended.set()
        forgetful.join(60)
    assert (found["files"], found["cached_files"], found["problems"]) == (count, count, [])


def test_names_in_a_list_may_contain_anything_but_a_newline(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = [b"carriage\rreturn", b"at the end\r", b"form\x0cfeed", b"not utf-8 \xff", "line\u2028separator".encode()]
    for name in names:
        (source / os.fsdecode(name)).write_bytes(b"x")
    settle()
    m = mount(source, "--read-only")
    (tmp_path / "list").write_bytes(b"".join(os.fsencode(m.path) + b"/" + name + b"\n" for name in names))
    done = report("--from-list", tmp_path / "list")
    assert done["files"] == done["cached_files"] == len(names) and not done["problems"]


def test_a_size_that_is_taken_out_of_the_file_is_the_default_again(
    mount: MakeMount, dataset: Path, tmp_path: Path
) -> None:
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "64M"\nsource-timeout = 30\n')
    m = mount(dataset, "--config", file)
    file.write_text("source-timeout = 30\n")  # one that is empty changes nothing
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: status["cache_size_bytes"] > 64 * MIB)
    shown = json.loads(cachefs("config", "show", m.path, "--json").stdout)["cache-size"]
    assert shown["origin"] == "default" and shown["value"] != "64M"
