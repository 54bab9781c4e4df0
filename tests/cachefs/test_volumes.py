"""The places of the root before and after the source is mounted anew."""

import pytest

from cachefs.source.volumes import Connection, Place, Volumes

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
