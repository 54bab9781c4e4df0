"""An index on a disk that fails: pages that the disk does not give are replaced.

LMDB reads data.mdb, and writes its table of readers in lock.mdb, through mmap(2). Where the disk fails, or became
read-only, or the file was cut off, the kernel sends SIGBUS instead of an error, and the process would end. The handler
puts memory in the place of the page, as systemd's journal does (sigbus.c): in data.mdb a page that says nothing, of
lock.mdb a copy of the whole table, as far as it can be read. `faults` tells what began to read before; then the index
counts as damaged (damage.py). Nothing is written to it any more, so no other reader needs the table.

The handler is a Python function that ctypes calls. That is safe for this signal only: the thread that touches the page
gets it at that instruction, which belongs to LMDB or to a copy out of its file.
"""

import ctypes
import logging
import mmap
import os
import signal
import struct

_BUS_ADRERR = 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP = 3  # MAYMOVE, FIXED
_SA_SIGINFO = 4
_DATA, _LOCK = b"/data.mdb", b"/lock.mdb"
_LARGEST_PAGE_BYTES = 32768
"""LMDB uses pages of the machine's size, but no larger ones than this."""

log = logging.getLogger(__name__)

MOST_FAULTS = 64
"""A damaged index is not read any more after so many: a disk may take seconds for each."""

faults = 0
"""How many this process has survived."""


class _SigInfo(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("errno", ctypes.c_int), ("code", ctypes.c_int), ("address", ctypes.c_void_p))


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_SigInfo), ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """As in glibc and musl."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_replaced: list[range] = []


def _silent_page() -> bytes:
    """A page that says nothing: a leaf with one empty key, and, as a meta page, no tables. An empty leaf would not do:
    LMDB reads its last key."""
    size = min(mmap.PAGESIZE, _LARGEST_PAGE_BYTES)
    page = bytearray(size)
    struct.pack_into("<10x4H", page, 0, 2, 18, size - 8, size - 8)  # a leaf, its bounds, the offset of the key
    for root in (80, 128):
        page[root : root + 8] = b"\xff" * 8
    return bytes(page) * (mmap.PAGESIZE // size)


def _mapping_of(address: int) -> tuple[range, bytes]:
    """The mapping of a file that the address lies in, and the path of the file."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            start, end = (int(number, 16) for number in line.split(b" ", 1)[0].split(b"-"))
            if start <= address < end:
                return range(start, end), line.rstrip(b"\n").removesuffix(b" (deleted)")
    return range(0), b""


def _replace(address: int) -> bool:
    """False: the address belongs to no index."""
    try:
        mapping, path = _mapping_of(address)
        if path.endswith(_DATA):
            page = address - address % mmap.PAGESIZE
            _put(range(page, page + mmap.PAGESIZE), _silent_page())
        elif path.endswith(_LOCK):
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                pages = range(mapping.start, mapping.stop, mmap.PAGESIZE)
                _put(mapping, b"".join(_read_page(memory.fileno(), page) for page in pages))
    except OSError:
        return False
    return any(address in place for place in _replaced)  # perhaps by another thread


def _read_page(memory: int, address: int) -> bytes:
    """Zeros if the disk does not give it, or if it lies behind the end of the file. `memory`: /proc/self/mem."""
    try:
        return os.pread(memory, mmap.PAGESIZE, address)
    except OSError:
        return bytes(mmap.PAGESIZE)


def _put(place: range, content: bytes) -> None:
    """At once, because other threads may use it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    new = _libc.mmap(None, len(place), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    _check(new != _MAP_FAILED)
    ctypes.memmove(new, content, len(content))
    _check(_libc.mremap(new, len(place), len(place), _MREMAP, place.start) == place.start)
    _replaced.append(place)


def _check(succeeded: bool) -> None:
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _handle(number: int, info: "ctypes._Pointer[_SigInfo]", context: object) -> None:
    global faults
    found = info.contents
    if found.code == _BUS_ADRERR and _replace(found.address or 0):
        faults += 1
    else:
        _libc.signal(number, None)  # SIG_DFL; Python's may not be called here. The instruction is repeated, and ends it


_action: _SigAction | None = None


def survive() -> None:
    """From now on this process outlives a disk that fails while an index is mapped. Raises OSError."""
    global _action
    try:
        _action = _action or _SigAction(handler=_Handler(_handle), flags=_SA_SIGINFO)
    except MemoryError:  # no executable memory: MemoryDenyWriteExecute=yes, with a libffi before 3.4
        log.warning("this process would not survive a read error of the disk of the cache: libffi is too old")
        return
    _check(_libc.sigaction(signal.SIGBUS, ctypes.byref(_action), None) == 0)
