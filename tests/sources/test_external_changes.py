"""Another node changes a source of each kind, while cachefs is mounted over it and while it is not.

What was read stays as it was. Everything else is of one version, and a new mount shows the new version.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.bindfs import take_over
from tests.conftest import Mount, contents, drop_caches_of, expire, settle, wait_for
from tests.same_calls import reads, result_of
from tests.sources.comparison import compare
from tests.sources.kinds import Image, Source
from tests.sources.trees import Contents, change, make_first

MakeMount = Callable[..., Mount]
STALE = ("ESTALE", "EIO", "ENOENT")


def is_read(path: Path) -> bool:
    """Does `read_some` read all of it?"""
    return path.name.startswith("read-") or path.parent.name == "nested"


def read_some(m: Mount, first: Contents) -> None:
    """List everything, read some files to the end and some in part, until all that was seen is believed."""

    def is_cached() -> bool:
        settle()
        drop_caches_of(m.path)
        names(m.path)
        before = m.ops().get("read", 0)
        check_versions(m, [path for path in first if is_read(path)], [first])
        return bool(m.flush()["source_ops"].get("read", 0) == before)

    wait_for(is_cached, bool)
    for path, data in first.items():
        if path.name == "partly":
            with open(m.path / path, "rb", buffering=0) as file:
                assert file.read(100) == data[:100]


def names(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


def check_versions(m: Mount, paths: Iterable[Path], versions: list[Contents]) -> list[Path]:
    """Each file has a version as a whole, or is stale. The stale ones."""
    found = {path: result_of((m.path / path).read_bytes) for path in paths}
    wrong = {
        path: data if isinstance(data, str) else f"{len(data)} bytes of no version"  # type: ignore[arg-type]
        for path, data in found.items()
        if not (data in STALE if isinstance(data, str) else any(version.get(path) == data for version in versions))
    }
    assert wrong == {}
    return [path for path, data in found.items() if data in STALE]


def check_all_versions(m: Mount, first: Contents, versions: list[Contents]) -> None:
    """What is stale, and is there at last, is found by another look-up."""
    stale = check_versions(m, first, versions)
    wait_for(lambda: check_versions(m, stale, versions), lambda paths: not set(paths) & versions[-1].keys())


def check_new(m: Mount, source: Source) -> None:
    """Everything is as on the source: names, attributes, links and bytes."""
    expected = contents(source.path)
    assert check_versions(m, expected, [expected]) == []
    assert names(m.path) == names(source.path)
    sizes = not source.counts_beneath
    mounted, found = (reads(root, directory_sizes=sizes) for root in (m.path, source.path))
    assert compare(source, mounted, found, numbers=False) == {}


@pytest.mark.promise("TE-1", "IM-1", "CH-1", "CH-10", "CH-17", "PI-1", "PI-2")
def test_another_node_changes_the_source(mount: MakeMount, source: Source, mode: list[str]) -> None:
    source.start(lambda _: make_first(source))
    settle()
    m = mount(source.path, *mode)
    first, listed = contents(source.path), names(source.path)
    read_some(m, first)
    change(source)
    if isinstance(source, Image):
        source.release()
        versions = [first]
    else:
        expire()  # also what the kernel keeps of a source
        versions = [first, contents(source.path)]
    if "--read-only" in mode:
        assert names(m.path) == listed
    assert check_versions(m, [path for path in first if is_read(path)], [first]) == []
    if not source.has_change_times:
        first = {path: data for path, data in first.items() if is_read(path) or path.parent.name != "same"}
    for _ in range(2):  # the first time from the kernel's pages
        check_all_versions(m, first, versions)
        drop_caches_of(m.path)
    if "--no-fastpath" not in mode:
        take_over(m, "restart")
        check_all_versions(m, first, versions)
    m.umount()
    if isinstance(source, Image):
        source.umount()
        source.mount()
    m.start()
    check_new(m, source)


@pytest.mark.promise("CH-17", "CH-25", "CH-26", "CH-28")
def test_the_source_is_mounted_again(mount: MakeMount, source: Source, mode: list[str]) -> None:
    """At first as it was, then with the changes of another node."""
    source.start(lambda _: make_first(source))
    settle()
    m = mount(source.path, *mode)
    first = contents(source.path)
    read_some(m, first)
    m.umount()
    source.umount()
    source.mount()
    m.start()
    assert check_versions(m, [path for path in first if is_read(path)], [first]) == []
    assert (m.ops().get("read", 0) == 0) == source.is_kept
    check_new(m, source)
    m.umount()
    change(source)
    if isinstance(source, Image):
        source.release()
    source.umount()
    source.mount()
    m.start()
    check_new(m, source)
