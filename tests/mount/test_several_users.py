"""Several users on a mount, and another node at its source, against the same calls in a directory without cachefs.

Everything is mutable, so that each call must have the same result. After a change by the other node, time passes until
the mount shows it. What docs/SEMANTICS.md names may differ: `ESTALE` for some seconds, and for calls by descriptors of
what the caller can no longer reach.

A part of `make nightly`. DIFFERENTIAL_RUNS, DIFFERENTIAL_CALLS: how much. DIFFERENTIAL_SEED: where to begin.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls_of_users import BY_DESCRIPTOR, DIRECTORIES, READS, ROOT, SLOTS, USERS, Call, Outcome, Side, User, calls
from tests.conftest import Mount, cachefs, expire
from tests.users import open_to_all

MakeMount = Callable[..., Mount]
RUNS, CALLS = int(os.environ.get("DIFFERENTIAL_RUNS", "0")), int(os.environ.get("DIFFERENTIAL_CALLS", "200"))
SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
ARGUMENTS = [("--mutable", "**"), ("--mutable", "**", "--cache", "metadata"), ("--cache", "none")]
CHANGED_ELSEWHERE, RESTARTED = 0.02, 0.005
"""The shares of steps in which another node changes something, and in which the daemon is restarted."""
REFUSED_MOST_S = 6.0
"""For how long a mount may refuse a call with ESTALE (PE-8, PE-10)."""


class Walk:
    """Random calls on two trees, one of them through a mount."""

    def __init__(self, m: Mount, source: Path, bare: Path, seed: int) -> None:
        self._draw = random.Random(seed)
        self._mount = m
        self._bare, self._mounted = Side(bare), Side(m.path)
        self._elsewhere = Side(source)
        self._done: list[str] = [f"DIFFERENTIAL_SEED={seed}"]
        self._calls = calls(self._draw, self._bare.files)
        self._changes = calls(self._draw, self._bare.files, by_path=True, changes=True)

    def make_tree(self) -> None:
        for path in DIRECTORIES[1:]:
            for side in (self._bare, self._elsewhere):
                side.do(ROOT, ("mkdir", (path, 0o777)))
                side.do(ROOT, ("chmod", (path, 0o777)))
        for user in USERS:
            self.step(user, ("put", (f"a/{user.uid}", os.O_CREAT, b"content")))

    def go(self, count: int) -> None:
        for _ in range(count):
            chance = self._draw.random()
            if chance < CHANGED_ELSEWHERE:
                self._change_elsewhere()
            elif chance < CHANGED_ELSEWHERE + RESTARTED and "--no-fastpath" not in Mount.given():
                self._done.append("cachefs restart")
                cachefs("restart", self._mount.path)
            else:
                self.step(self._draw.choice(USERS), next(self._calls))

    def _change_elsewhere(self) -> None:
        """Several changes, then what all users see by their descriptors, in some cases after a change through the
        mount of what the other node has changed."""
        for user, slot in self._bare.opened():
            self.step(user, ("close", (slot,)))
        writes = self._draw.random() < 0.3  # where a process has a file open for writing, others see more of it
        for user in USERS:
            for slot in range(SLOTS):
                flags = self._draw.choice([os.O_RDONLY, os.O_RDWR]) if writes else os.O_RDONLY
                self.step(user, ("open", (slot, self._draw.choice(self._bare.files() or ["x"]), flags)))
                self.step(user, self._draw.choice([("read", (slot, 0, 5000)), ("mapped", (slot,))]))
        changed = [next(self._changes) for _ in range(8)]
        for call in changed:
            expected, found = self._bare.do(ROOT, call), self._elsewhere.do(ROOT, call)
            self._done.append(f"another node: {call} {expected}")
            self._check(expected == found, f"the source differs: {found}")
        expire()
        if self._draw.random() < 0.5:
            path = str(self._draw.choice(changed)[1][0])
            self.step(ROOT, self._draw.choice([("chmod", (path, 0o755)), ("note", (path, b"here"))]))
        for user, slot in self._bare.opened():
            for name, *arguments in self._draw.sample([("end",), ("read", 0, 1 << 16), ("mapped",)], 3):
                self.step(user, (name, (slot, *arguments)))
        for user in USERS:
            for name in ("listing", "content", "stat"):
                for path in DIRECTORIES if name == "listing" else self._bare.files():
                    self.step(user, (name, (path,)))

    def step(self, user: User, call: Call) -> None:
        name, arguments = call
        if name in BY_DESCRIPTOR and not self._bare.has_open(user, int(str(arguments[0]))):
            return
        expected = self._bare.do(user, call)
        self._done.append(f"{user.uid}: {call} {expected}")
        found = self._mounted.do(user, call)
        until_s = time.monotonic() + REFUSED_MOST_S
        while found != expected and found == ("failed", errno.ESTALE) and time.monotonic() < until_s:
            time.sleep(0.2)
            found = self._mounted.do(user, call)
        if found == ("failed", errno.ESTALE) and name in BY_DESCRIPTOR and name not in READS:
            pytest.skip("a call by a descriptor of what the caller can no longer reach")
        self._check(found == expected, f"the mount: {found}")

    def _check(self, is_right: bool, message: str) -> None:
        if not is_right:
            pytest.fail("\n".join([*self._done[-60:], message]))

    def compare_all(self) -> None:
        """All that root sees in both trees."""
        for directory in DIRECTORIES:
            expected = self._bare.do(ROOT, ("listing", (directory,)))
            self.step(ROOT, ("listing", (directory,)))
            for each in names_of(expected):
                for name in ("stat", "acl", "content", "target"):
                    self.step(ROOT, (name, (os.path.join(directory, each),)))

    def end(self) -> None:
        self._bare.end()
        self._mounted.end()


def names_of(listing: Outcome) -> list[str]:
    names = listing[1]
    return [str(name) for name in names] if isinstance(names, list) else []


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
@pytest.mark.parametrize("run", range(RUNS))
def test_users_get_what_they_would_get_without_cachefs(
    mount: MakeMount, disk: Path, arguments: tuple[str, ...], run: int
) -> None:
    source, bare = disk / "source", disk / "bare"
    for tree in (source, bare):
        tree.mkdir()
        tree.chmod(0o1777)
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source / "any")
    open_to_all(m.path / "any")
    walk = Walk(m, source, bare, SEED + run)
    try:
        walk.make_tree()
        walk.go(CALLS)
        expire()
        walk.compare_all()
    finally:
        walk.end()
