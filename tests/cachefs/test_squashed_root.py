"""As whom the source is asked where it refuses root (cachefs/source/credentials.py)."""

import os
from collections.abc import Callable

import pytest

from cachefs.source.credentials import Caller, as_admitted, call_for
from cachefs.source.shares import MAX_CALLERS, Party

OWNER, OTHER = 5001, 5002


def caller(uid: int) -> Caller:
    return Caller(uid, uid, -1)


def fs_uid() -> int:
    """Of the calling thread."""
    with open("/proc/thread-self/status") as status:
        return next(int(line.split()[4]) for line in status if line.startswith("Uid:"))


def granted_to(*uids: int) -> Callable[[], int]:
    """A call that only these users may make; returns who made it."""

    def call() -> int:
        uid = fs_uid()
        if uid not in uids:
            raise PermissionError
        return uid

    return call


def test_daemon_asks_first() -> None:
    assert call_for([caller(OWNER)], lambda: as_admitted(granted_to(0, OWNER))) == 0


def test_waiting_process_asks_where_root_is_refused() -> None:
    asked = lambda: as_admitted(granted_to(OWNER))  # noqa: E731
    assert call_for([caller(OTHER), caller(OWNER)], asked) == OWNER
    assert os.geteuid() == 0 and fs_uid() == 0
    for waiting in ([], [caller(OTHER)]):
        with pytest.raises(PermissionError):
            call_for(waiting, asked)


def test_answer_that_is_not_for_others_is_not_used() -> None:
    with pytest.raises(PermissionError):
        call_for([caller(OWNER)], lambda: as_admitted(granted_to(OWNER), lambda _: False))


def test_change_as_one_caller_never_becomes_one_of_another() -> None:
    """A change has taken the identity of its caller: a refusal is final, and the identity stays."""

    def change() -> int:
        with pytest.raises(PermissionError):
            as_admitted(granted_to(OWNER))
        return fs_uid()

    assert call_for([caller(OWNER)], lambda: caller(OTHER).run(change)) == OTHER


def test_party_has_one_process_of_each_user_and_not_of_root() -> None:
    party = Party(0, [caller(0), caller(OWNER), caller(OWNER)])
    assert party.callers == [caller(OWNER)]
    party.admit(caller(uid) for uid in range(1, 100))
    assert len(party.callers) == MAX_CALLERS


def test_process_that_joins_is_asked_for_too() -> None:
    theirs, ours = Party(0), Party(OWNER, [caller(OWNER)])
    with ours.waits_for(theirs):
        assert theirs.callers == [caller(OWNER)]
