"""What df, find, cp -a, rsync -a, tar and git find on a mount is what they find on its source, of each kind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, settle
from tests.same_calls import changes, make_tree, new_repository, programs, reads
from tests.sources.comparison import compare
from tests.sources.kinds import Source

MakeMount = Callable[..., Mount]


@pytest.mark.promise("FA-38")
def test_programs_find_what_is_on_the_source(mount: MakeMount, source: Source, tmp_path: Path, mode: list[str]) -> None:
    source.start(lambda root: make_tree(root, source.highest_owner))
    settle()
    m = mount(source.path, *mode)
    sizes = not source.counts_beneath
    for _ in range(2):  # the second time from the cache
        mounted, found = (reads(root, directory_sizes=sizes) for root in (m.path, source.path))
        assert compare(source, mounted, found) == {}
    what = {"counts": sizes, "numbers": source.has_numbers}
    mounted, found = programs(m.path, tmp_path / "mounted", **what), programs(source.path, tmp_path / "out", **what)
    assert compare(source, mounted, found) == {}
    if source.is_writable and "--read-only" not in mode:
        (source.path / "beside").mkdir()
        places = m.path, source.path / "beside"
        assert compare(source, *(new_repository(place / "new") for place in places)) == {}
        if source.knows_files:
            assert compare(source, *(changes(place, source.highest_owner - 1) for place in places)) == {}
