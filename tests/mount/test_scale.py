"""No memory is used for each file, and nothing is loaded at the start."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, settle

MakeMount = Callable[..., Mount]
FILES = 200_000
DIRECTORIES = 200
BYTES_PER_FILE = 400
MOUNT_S = 0.5
"""CPU time, more than a new cache takes."""


def rss_anon_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def processor_s(pid: int) -> float:
    """The CPU time of a process: unlike elapsed time, it hardly depends on other load."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pinned_metadata_costs_no_memory_and_mounting_no_time(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for directory in range(DIRECTORIES):
        place = source / f"class-{directory:03}"
        place.mkdir(parents=True)
        for index in range(FILES // DIRECTORIES):
            os.close(os.open(place / f"sample-{index:06}.jpg", os.O_WRONLY | os.O_CREAT))
    settle()
    m = mount(source, "--read-only")
    before, fresh_s = rss_anon_bytes(m.pid), processor_s(m.pid)
    count = 0
    for directory, _, names in os.walk(m.path):
        for name in names:
            os.lstat(os.path.join(directory, name))
            count += 1
    assert count == FILES
    assert m.flush()["pinned_inodes"] == FILES + DIRECTORIES + 1
    after = rss_anon_bytes(m.pid)
    print(f"RssAnon {before / 1e6:.1f} → {after / 1e6:.1f} MB: {(after - before) / FILES:.0f} bytes a file, "
          f"{after / FILES:.0f} with all that Python takes")  # fmt: skip
    assert after / FILES <= BYTES_PER_FILE
    m.umount()
    m.start("--revalidate", "never")
    spent_s = processor_s(m.pid)
    print(f"mounting a cache of {FILES:,} files: {spent_s:.2f} s of the processor, a new one {fresh_s:.2f} s")
    assert spent_s <= fresh_s + MOUNT_S
    assert m.status()["pinned_inodes"] == FILES + DIRECTORIES + 1
    assert len(os.listdir(m.path / "class-000")) == FILES // DIRECTORIES
    assert m.ops() == {}
