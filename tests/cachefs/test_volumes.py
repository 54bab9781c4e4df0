"""The places of the root before and after the source is mounted anew."""

import errno
import os
from pathlib import Path

import pytest

from cachefs.source.volumes import Connection, Place, Volumes
from cachefs.system import syscalls
from cachefs.system.descriptors import closing
from tests.conftest import raises_errno

FIRST, SECOND, THIRD = Place(1, 10), Place(2, 20), Place(3, 30)


@pytest.mark.parametrize("number", [0, 5])
def test_calls_that_are_under_way_may_have_the_root_before(number: int) -> None:
    """Not where inode numbers do not last. Regression: after the second time the first root was kept instead."""
    connection = Connection(Volumes(-1, [FIRST]), FIRST.device, number)
    for before, root in ((FIRST, SECOND), (SECOND, THIRD)):
        connection = connection.following(root)
        assert connection.root_device == root.device
        assert connection.volumes.without_numbers == set()
        assert connection.volumes.numbers == dict.fromkeys([root] if number else [root, before], 0)


@pytest.mark.promise("CH-36")
def test_a_source_whose_numbers_do_not_stay_is_so_after_it_is_mounted_anew() -> None:
    connection = Connection(Volumes(-1, [FIRST]), FIRST.device)
    connection.volumes.forgo_numbers()
    connection.volumes.without_numbers.add(7)  # another volume, which is identified again
    for root in (SECOND, THIRD):
        connection = connection.following(root)
        assert connection.volumes.without_numbers == {0}


@pytest.mark.parametrize("is_late", [False, True])
def test_an_object_of_a_deleted_subvolume_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Regression: it has no device number any more, which was a bug in the look-up, answered with EIO."""
    gone = Place(7, 0)
    with closing(os.open(tmp_path, os.O_RDONLY)) as fd:
        monkeypatch.setattr(syscalls, "place_of", lambda _: Place(7, 8) if is_late else gone)
        connection = Connection(Volumes(fd, [FIRST]), FIRST.device)
        raises_errno(errno.ESTALE, lambda: connection.stat(fd, b"", ask=False))
        assert gone not in connection.volumes.numbers
