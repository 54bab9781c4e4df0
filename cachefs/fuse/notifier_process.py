"""The process that notifies the kernel. Run by the daemon (notifier.py): python -I -S -c THIS DEVICE SERVED LANE…

It shares no descriptor with the daemon, so that it keeps nothing open of a daemon that was killed.

DEVICE   a /dev/fuse of its own for the daemon's connection (FUSE_DEV_IOC_CLONE). When the daemon's is closed, the
         kernel ends the requests that were read from it, and so ends what a notification waits for.
SERVED   a file. Processes that may answer requests have a shared lock on it.
LANE…    sockets, each with a thread of its own. A packet has one notification or more. The answer is the errno of the
         last one that failed, or 0.
"""

import _thread
import errno
import fcntl
import os
import signal
import struct
import sys

PACKET_BYTES = 64 << 10
_REQUEST_BYTES = (1 << 20) + (64 << 10)  # the kernel refuses a read into less than a WRITE and its header need
_OUT_HEAD = struct.Struct("<IiQ")  # fuse_out_header: length, error, unique
_IN_HEAD = struct.Struct("<IIQ")  # fuse_in_header: length, opcode, unique
_UNKNOWN = (errno.ENOENT, errno.ENOTDIR)
"""The kernel does not cache it: no error."""


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
    """Serve one lane until the daemon has gone, and send what it has sent last. The last lane ends the process."""
    try:
        while packet := os.read(lane, PACKET_BYTES):
            os.write(lane, b"%d" % notify(device, packet))
    except OSError:  # the daemon has gone before it got the answer
        pass
    running.remove(lane)
    if not running:
        os._exit(0)


def end_requests(device: int) -> None:
    """Fail the requests that no process will answer, until the mount is gone: a notification may wait for one."""
    while True:
        try:
            request = os.read(device, _REQUEST_BYTES)
            os.write(device, _OUT_HEAD.pack(_OUT_HEAD.size, -errno.ENOTCONN, _IN_HEAD.unpack_from(request)[2]))
        except OSError as error:
            if error.errno != errno.ENOENT:  # ENOENT: it was interrupted, or needs no answer
                return


def main(device: int, served: int, *lanes: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # children.py starts it with all signals blocked
    running = list(lanes)
    for lane in lanes:
        _thread.start_new_thread(serve, (device, lane, running))
    fcntl.flock(served, fcntl.LOCK_EX)
    end_requests(device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
