"""The process that notifies the kernel. Run by the daemon (notifier.py): python -I -S -c THIS DEVICE SERVED LANE…

It has no descriptor of the daemon's, so that it keeps nothing of a daemon open that has been killed.

DEVICE   a /dev/fuse of its own on the daemon's connection (FUSE_DEV_IOC_CLONE). When the daemon's is closed the kernel
         ends the requests that were read from it, and with them what a notification waits for.
SERVED   a file. Every process that may answer requests holds a shared lock on it.
LANE…    sockets, each with a thread of its own. A packet is one notification or several. The answer is the errno of the
         last one that failed, or 0.
"""

import _thread
import errno
import fcntl
import os
import struct
import sys

PACKET_BYTES = 64 << 10
_REQUEST_BYTES = (1 << 20) + (64 << 10)  # the kernel refuses to be read with less than a WRITE and its header
_OUT_HEAD = struct.Struct("<IiQ")  # fuse_out_header: length, error, unique
_IN_HEAD = struct.Struct("<IIQ")  # fuse_in_header: length, opcode, unique
_UNKNOWN = (errno.ENOENT, errno.ENOTDIR)
"""The kernel does not have it: fine."""


def notify(device: int, packet: bytes) -> int:
    failed, at = 0, 0
    while at < len(packet):
        length = _OUT_HEAD.unpack_from(packet, at)[0]
        try:
            os.write(device, packet[at : at + length])
        except OSError as error:
            failed = failed if error.errno in _UNKNOWN else error.errno or errno.EIO
        at += length
    return failed


def serve(device: int, lane: int, running: list[int]) -> None:
    """Until the daemon has gone. What it sent last is sent all the same. The last lane ends the process."""
    try:
        while packet := os.read(lane, PACKET_BYTES):
            os.write(lane, b"%d" % notify(device, packet))
    except OSError:  # it has gone before it could hear
        pass
    running.remove(lane)
    if not running:
        os._exit(0)


def end_requests(device: int) -> None:
    """Answer what nobody will answer: one of them may be what a notification waits for. Until the mount is gone."""
    while True:
        try:
            request = os.read(device, _REQUEST_BYTES)
            os.write(device, _OUT_HEAD.pack(_OUT_HEAD.size, -errno.ENOTCONN, _IN_HEAD.unpack_from(request)[2]))
        except OSError as error:
            if error.errno != errno.ENOENT:  # it was interrupted, or wants no answer
                return


def main(device: int, served: int, *lanes: int) -> None:
    running = list(lanes)
    for lane in lanes:
        _thread.start_new_thread(serve, (device, lane, running))
    fcntl.flock(served, fcntl.LOCK_EX)
    end_requests(device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
