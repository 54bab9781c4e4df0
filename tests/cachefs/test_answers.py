"""Notifications overtake no answer: the kernel would take over a former name after it has dropped it."""

import os
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import trio

from cachefs.contract import shared as layout
from cachefs.contract.fuse import FUSE_OPERATIONS, IN_HEADER
from cachefs.fastpath.answers import Answers
from cachefs.fastpath.shared_memory import SLOTS_OFFSET, Shared
from cachefs.fuse.notifier import KernelNotifier

OPCODES = {each.name: each.number for each in FUSE_OPERATIONS}


@pytest.fixture
def shared() -> Iterator[Shared]:
    with closing(Shared.create()) as memory:
        yield memory


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """(of the daemon, of the fast path)"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@asynccontextmanager
async def waiting_notifier(
    writer: int, shared: Shared, ends: tuple[socket.socket, socket.socket]
) -> AsyncIterator[tuple[trio.Nursery, KernelNotifier]]:
    """It runs, and the daemon has given an answer that the fast path has not taken."""
    async with trio.open_nursery() as nursery:
        sending = KernelNotifier(writer)
        sending.answers_delivered = Answers(shared, ends[0]).delivered
        nursery.start_soon(sending.run)
        ends[0].send(b"an answer")
        yield nursery, sending
        nursery.cancel_scope.cancel()


def serve(shared: Shared, slot: int, operation: str, unique: int) -> None:
    """As a thread of the fast path does that has read this request."""
    header = IN_HEADER.codec().pack(IN_HEADER.size, OPCODES[operation], unique, 1, 0, 0, 0)
    os.pwrite(shared.fd, header, layout.HEAD_BYTES + slot * layout.SLOT_BYTES)
    word = 7 << 8 | layout.SlotState.SLOT_READING
    head = word.to_bytes(8, "little") + unique.to_bytes(8, "little")
    os.pwrite(shared.fd, head, SLOTS_OFFSET + slot * layout.SLOT_HEAD.size)


def test_a_notification_waits_for_the_answers_that_were_given_before(
    device: tuple[int, int], shared: Shared, ends: tuple[socket.socket, socket.socket]
) -> None:
    notified = select.poll()
    notified.register(device[0], select.POLLIN)

    async def main() -> None:
        async with waiting_notifier(device[1], shared, ends) as (nursery, sending):
            serve(shared, 3, "LOOKUP", 99)
            nursery.start_soon(sending.drop, [(7, b"name")], [])
            assert not await trio.to_thread.run_sync(notified.poll, 300)
            ends[1].recv(100, socket.MSG_PEEK)
            assert not await trio.to_thread.run_sync(notified.poll, 300), "the kernel does not have it yet"
            ends[1].recv(100)
            assert not await trio.to_thread.run_sync(notified.poll, 300), "the other answer"
            serve(shared, 3, "LOOKUP", 100)
            assert await trio.to_thread.run_sync(notified.poll, 10_000)

    trio.run(main)


def test_no_notification_waits_for_a_read(shared: Shared, ends: tuple[socket.socket, socket.socket]) -> None:
    """It may wait for the source."""

    async def main() -> None:
        serve(shared, 3, "READ", 99)
        with trio.fail_after(10):
            await Answers(shared, ends[0]).delivered()

    trio.run(main)


def test_no_notification_waits_when_the_mount_has_ended(
    shared: Shared, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Found by random damages: a mount was unmounted while its daemon recovered from a damaged index."""
    ends[0].send(b"an answer")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Answers(shared, ends[0]).delivered)
            await trio.sleep(0.01)
            ends[0].close()

    trio.run(main)


def test_a_caller_that_does_not_wait_any_longer_still_notifies(
    device: tuple[int, int], shared: Shared, ends: tuple[socket.socket, socket.socket]
) -> None:
    async def main() -> None:
        async with waiting_notifier(device[1], shared, ends) as (_, sending):
            with trio.move_on_after(0.1) as limit:
                await sending.drop([(7, b"name")], [])
            assert limit.cancelled_caught
            assert b"name" in await trio.to_thread.run_sync(os.read, device[0], 1000)

    trio.run(main)
