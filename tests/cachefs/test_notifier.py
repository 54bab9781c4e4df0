"""What a daemon that leaves does about notifications that the kernel has not taken yet."""

import os
import threading

import trio
import trio.testing

from cachefs.fuse import notifier_process
from cachefs.fuse.notifier import MOST_REMEMBERED, KernelNotifier
from cachefs.store.index.index import Index
from cachefs.system.clock import SYSTEM


def test_a_daemon_leaves_at_once_and_its_successor_sends_what_is_not_confirmed(
    index: Index, device: tuple[int, int]
) -> None:
    reader, writer = device
    filled = os.write(writer, bytes(1 << 16))

    def empty() -> None:
        left = filled
        while left:
            left -= len(os.read(reader, left))

    emptying = threading.Thread(target=empty)

    async def leave() -> None:
        async with trio.open_nursery() as nursery:
            leaving = KernelNotifier(writer)
            nursery.start_soon(leaving.run)
            nursery.start_soon(leaving.drop, [(7, b"under way")], [])
            await trio.testing.wait_all_tasks_blocked(0.5)
            leaving.leave_to_successor()
            with trio.fail_after(10):
                await leaving.drop([(8, b"held back")], [])
                await leaving.pages([9])
            leaving.save(index)
            emptying.start()
            nursery.cancel_scope.cancel()

    async def take_over(wanted: int) -> bytes:
        sent = b""
        async with trio.open_nursery() as nursery:
            successor = KernelNotifier(writer)
            nursery.start_soon(successor.run)
            successor.restore(index)
            with trio.fail_after(20):
                await successor.drop([(10, b"end")], [])
            nursery.cancel_scope.cancel()
        while b"end" not in sent:
            sent += os.read(reader, wanted)
        return sent

    trio.run(leave)
    emptying.join()
    assert b"under way" in os.read(reader, 1 << 16), "the predecessor's process has sent it"
    first = trio.run(take_over, 1 << 16)
    assert all(sent in first for sent in (b"under way", b"held back", (9).to_bytes(8, "little")))
    assert b"held back" not in trio.run(take_over, 1 << 16), "once"


def test_many_notifications_in_several_packets(device: tuple[int, int]) -> None:
    """As many as no socket takes at once."""
    reader, writer = device
    names = [b"%05d" % number + b"n" * 250 for number in range(2_000)]
    received = b""

    async def send() -> None:
        nonlocal received
        async with trio.open_nursery() as nursery:
            sending = KernelNotifier(writer)
            nursery.start_soon(sending.run)
            nursery.start_soon(sending.drop, [(7, name) for name in names], [])
            while names[-1] not in received:
                received += await trio.to_thread.run_sync(os.read, reader, 1 << 16)
            nursery.cancel_scope.cancel()

    trio.run(send)
    assert len(received) > notifier_process.PACKET_BYTES
    at = [received.find(name) for name in names]
    assert -1 not in at and at == sorted(at)


def test_it_is_known_between_which_times_the_kernel_has_dropped_attributes(device: tuple[int, int]) -> None:
    reader, writer = device

    async def main() -> None:
        sending = KernelNotifier(writer)
        first_ns = SYSTEM.monotonic_ns()
        assert not sending.dropped_between(7, 1, first_ns)
        assert sending.attributes(7)
        second_ns = SYSTEM.monotonic_ns()
        assert sending.dropped_between(7, first_ns, second_ns) and not sending.dropped_between(8, first_ns, second_ns)
        assert not sending.dropped_between(7, second_ns, SYSTEM.monotonic_ns())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sending.run)
            sending.drop_soon([(1, b"name")], [8, 7])
            assert not sending.dropped_between(7, first_ns, SYSTEM.monotonic_ns()), "it will again"
            await sending.drop([(1, b"end")], [])
            assert not sending.dropped_between(7, first_ns, second_ns), "it has again"
            third_ns = SYSTEM.monotonic_ns()
            assert sending.dropped_between(7, first_ns, third_ns)
            assert not sending.dropped_between(8, first_ns, third_ns), "perhaps it did not know the inode"
            for number in range(1000, 1000 + MOST_REMEMBERED):
                sending.attributes(number)
                os.read(reader, 1 << 16)
            assert not sending.dropped_between(7, first_ns, third_ns), "forgotten"
            nursery.cancel_scope.cancel()

    trio.run(main)
