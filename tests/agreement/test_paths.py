"""The path of an inode: cachefs/metadata/inode_paths.py against fastpath/c/cache/index.c.

The fast path takes any name that the index has; what it opens by that is compared with the record. Where each inode
has one name that leads to it, both find the same.
"""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.metadata.inode_paths import Paths, link_key, link_value
from cachefs.store.index.environment import TOMBSTONE, Environment, View
from cachefs.store.index.records import PINNED, Dentry, Inode, inode_key
from tests.agreement.library import FastPath, examples
from tests.agreement.test_window import environments

_names = st.binary(min_size=1, max_size=12).filter(lambda name: not {b"/", b"\0"} & {bytes([c]) for c in name})
_directory = Inode(0, *[0] * 22)._replace(flags=PINNED, mode=0o040755)


@st.composite
def trees(draw: st.DrawFn) -> dict[int, tuple[int, bytes]]:
    """Number → (parent, name). Some parents are not there, and some names lead in a circle."""
    count = draw(st.integers(1, 12))
    numbers = list(range(2, 2 + count))
    tree = {}
    for number in numbers:
        known = st.sampled_from([ROOT_INODE, *(each for each in numbers if each < number)])
        parent = draw(known | known | known | st.integers(2, 20))
        tree[number] = parent, draw(_names) + b"%d" % number
    return tree


def put(environment: Environment, table: Table, key: bytes, value: bytes) -> None:
    with environment.write() as txn:
        txn.put(key, value, db=environment.tables[table])


def know(session: Environment, durable: Environment, tree: dict[int, tuple[int, bytes]], in_session: set[int]) -> None:
    for environment in (session, durable):
        with environment.write() as txn:
            for table in environment.tables:
                txn.drop(table, delete=False)
    for number, link in tree.items():
        environment = session if number in in_session else durable
        put(environment, Table.INODES, inode_key(number), _directory.pack())
        put(environment, Table.LINKS, link_key(number, link), link_value(0))
        dentry = Dentry(PINNED, number, 1, 0)
        put(environment, Table.DENTRIES, inode_key(link[0]) + link[1], dentry.pack())


def python_path(session: Environment, durable: Environment, number: int) -> bytes | None:
    with View(session, durable) as view:
        try:
            return Paths().path(view, number)
        except OSError as error:
            assert error.errno == errno.ESTALE
            return None


@examples(100)
@given(tree=trees(), data=st.data())
def test_both_find_the_same_path(
    fast_path: FastPath,
    tmp_path_factory: pytest.TempPathFactory,
    tree: dict[int, tuple[int, bytes]],
    data: st.DataObject,
) -> None:
    """Of what the session has, the durable index, or one hides of the other."""
    place = _place(tmp_path_factory)
    with environments(place) as (session, durable), fast_path.over(session, durable):
        know(session, durable, tree, data.draw(st.sets(st.sampled_from(sorted(tree)))))
        hidden = data.draw(st.sets(st.sampled_from(sorted(tree)), max_size=2))
        for number in hidden:
            put(session, Table.LINKS, link_key(number, tree[number]), TOMBSTONE)
        for number in (ROOT_INODE, *tree, 99):
            with fast_path.reading():
                found = fast_path.path(number)
            assert found == python_path(session, durable, number), number


def test_the_root_has_an_empty_path(fast_path: FastPath, tmp_path: Path) -> None:
    with environments(tmp_path) as (session, durable), fast_path.over(session, durable), fast_path.reading():
        assert fast_path.path(ROOT_INODE) == b""


@pytest.mark.parametrize(("length", "is_found"), [(153, True), (154, True), (155, False)])
def test_a_path_that_is_too_long_for_the_fast_path_has_none(
    fast_path: FastPath, tmp_path: Path, length: int, is_found: bool
) -> None:
    """It has 32 KiB for one, with the final zero."""
    names = [*(b"%0255d" % number for number in range(127)), b"x" * 100, b"y" * length]
    assert (len(b"/".join(names)) + 1 <= 32 << 10) == is_found
    tree = {number: (number - 1, name) for number, name in enumerate(names, start=2)}
    with environments(tmp_path) as (session, durable), fast_path.over(session, durable):
        know(session, durable, tree, set())
        expected = python_path(session, durable, max(tree))
        assert expected is not None
        with fast_path.reading():
            assert fast_path.path(max(tree)) == (expected if is_found else None)


def _place(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("paths")
