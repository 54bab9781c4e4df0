"""Identities: what is read of a process, and that a thread gets its own back."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cachefs.client.client import peer
from cachefs.source.credentials import CAP_FSETID, CAP_SYS_RESOURCE, Caller, Identity, own_identity, unknown_writer
from cachefs.system import syscalls
from tests.users import IDS, as_user

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
_WAITS = "import sys; print(flush=True); sys.stdin.read()"


def identity_of(command: list[str], uid: int = 0, gid: int = 0) -> Identity:
    """Of a process that runs `command` and then waits."""
    with subprocess.Popen(
        [*command, sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return Caller(uid, gid, process.pid).identity()


def in_a_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_identities_survive_packing() -> None:
    for groups in ((), (1, 2, 4_000_000_000)):
        identity = Identity(1234, 4_000_000_001, groups, 1 << 40 | 1)
        assert Identity.unpack(identity.pack()) == identity


@pytest.mark.promise("PE-25")
@root_only
@pytest.mark.parametrize("number", IDS)
def test_a_thread_takes_any_user_and_group(number: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    directory = os.open(tmp_path, os.O_RDONLY)  # others may not enter the directories above
    for uid, gid, groups in ((number, 2, ()), (2, number, ()), (number, number, (number,))):
        name = f"{uid}-{gid}-{len(groups)}"
        identity = Identity(uid, gid, groups, 0)
        make = partial(os.mknod, name, dir_fd=directory)
        in_a_thread(partial(identity.run, make))
        made = os.stat(name, dir_fd=directory)
        assert (made.st_uid, made.st_gid) == (uid, gid)
        assert Identity.unpack(identity.pack()) == identity
    os.close(directory)


@pytest.mark.promise("PE-25")
@root_only
@pytest.mark.parametrize("number", IDS)
def test_the_other_end_of_a_socket_has_any_user(number: int) -> None:
    ends = as_user(number, number, [], socket.socketpair)
    assert isinstance(ends, tuple)
    for end in ends:
        with end:
            assert peer(end) == (os.getpid(), number)


def test_our_own_process_has_our_own_identity() -> None:
    assert Caller(os.geteuid(), os.getegid(), os.getpid()).identity() == own_identity()


@pytest.mark.promise("WR-1")
@root_only
def test_a_user_has_no_capabilities_but_its_groups() -> None:
    command = ["setpriv", "--reuid", "1234", "--regid", "4321", "--groups", "7,8", "--"]
    assert identity_of(command, 1234, 4321) == Identity(1234, 4321, (7, 8), 0)


@pytest.mark.promise("WR-1")
@root_only
def test_root_with_fewer_capabilities_keeps_fewer() -> None:
    found = identity_of(["setpriv", "--bounding-set", "-fsetid", "--inh-caps", "-fsetid", "--"])
    assert own_identity().capabilities & ~found.capabilities == 1 << 4


@pytest.mark.promise("WR-4")
@root_only
def test_capabilities_of_another_user_namespace_do_not_count() -> None:
    assert identity_of(["unshare", "--user", "--map-root-user", "--"]).capabilities == 0


@pytest.mark.promise("WR-4")
@root_only
@pytest.mark.parametrize("capability", [0, 1 << 19], ids=["", "daemon without CAP_SYS_PTRACE"])
def test_capabilities_of_a_namespace_with_the_same_map_do_not_count(capability: int) -> None:
    """Before: a namespace was told by its map."""
    own = own_identity()
    daemon = replace(own, capabilities=own.capabilities & ~capability)
    unshares = f"import ctypes; assert not ctypes.CDLL(None).unshare(0x10000000); {_WAITS}"
    with subprocess.Popen([sys.executable, "-c", unshares], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(Path(f"/proc/self/{name}").read_text())
        assert b"CapEff:\t0000000000000000" not in Path(f"/proc/{process.pid}/status").read_bytes()
        found = in_a_thread(partial(daemon.run, Caller(0, 0, process.pid).identity))
        assert isinstance(found, Identity)
        assert found.capabilities == 0
    with subprocess.Popen([sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        found = in_a_thread(partial(daemon.run, Caller(0, 0, process.pid).identity))
        assert isinstance(found, Identity)
        assert found.capabilities & CAP_FSETID


@root_only
def test_a_process_that_got_the_number_of_another_lends_it_nothing() -> None:
    assert Caller(1234, 4321, os.getpid()).identity() == Identity(1234, 4321, (4321,), 0)


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert Caller(1234, 1234, process.pid).identity() == Identity(1234, 1234, (1234,), 0)
    assert not Caller(0, 0, process.pid).identity().capabilities & CAP_SYS_RESOURCE


@root_only
def test_a_thread_acts_as_the_caller_and_gets_its_own_identity_back() -> None:
    def now() -> tuple[object, ...]:
        lines = Path("/proc/thread-self/status").read_text().splitlines()
        return tuple(line for line in lines if line.split(":")[0] in ("Uid", "Gid", "Groups", "CapEff"))

    def check() -> object:
        before = now()
        there = Identity(1234, 4321, (7, 8), 0).run(now)
        with pytest.raises(ZeroDivisionError):
            Identity(1234, 4321, (), 0).run(lambda: 1 // 0)
        assert now() == before
        return there

    assert in_a_thread(check) == (
        "Uid:\t0\t0\t0\t1234",
        "Gid:\t0\t0\t0\t4321",
        "Groups:\t7 8 ",
        "CapEff:\t0000000000000000",
    )


def test_an_unknown_writer_has_no_exemptions() -> None:
    assert unknown_writer().capabilities & (1 << 4 | CAP_SYS_RESOURCE) == 0
    assert syscalls.thread_capabilities()[0] == own_identity().capabilities


def _with_fs_ids(uid: int, gid: int) -> Identity:
    """Of a process that has changed the ids for files alone, as a file server does. (setfsuid is of a thread.)"""
    change = f"import ctypes; libc = ctypes.CDLL(None); libc.setfsgid({gid}); libc.setfsuid({uid}); {_WAITS}"
    with subprocess.Popen(
        ["setpriv", "--groups", "7,8", "--", sys.executable, "-c", change],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return Caller(uid, gid, process.pid).identity()


@pytest.mark.promise("WR-1")
@root_only
def test_the_ids_that_count_are_those_for_files() -> None:
    """By them the kernel says who asks; else the groups would be taken for those of another process."""
    found = _with_fs_ids(1234, 4321)
    assert (found.uid, found.gid, found.groups) == (1234, 4321, (7, 8))
