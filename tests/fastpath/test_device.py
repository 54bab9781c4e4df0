"""How the program ends with its connection, on a real /dev/fuse."""

import os
import struct
from pathlib import Path

import pytest

from cachefs.fastpath import processes
from cachefs.options import Options
from cachefs.system import syscalls
from tests.agreement.library import OUT
from tests.fastpath.program import Program
from tests.processes import connections, device_of

pytestmark = [
    pytest.mark.skipif(not processes.is_built(), reason="the fast path is not built"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]
ABORT_ERROR = 1 << 21
_INIT_OUT = struct.Struct("<4I2H2I2H8I")
_REQUEST_BYTES = 1 << 20


def negotiate(device: int) -> None:
    """As a daemon that wants to be told by ECONNABORTED when its connection is aborted."""
    unique = struct.unpack_from("<IIQ", os.read(device, _REQUEST_BYTES))[2]
    answer = _INIT_OUT.pack(7, 31, 0, ABORT_ERROR, 0, 0, 4096, 0, 0, 0, *[0] * 8)
    os.write(device, OUT.pack(OUT.size + len(answer), 0, unique) + answer)


def test_a_connection_that_ends_while_a_request_is_read_ends_the_program(tmp_path: Path) -> None:
    """The kernel answers such a read with ECONNABORTED, and a read after the end with ENODEV or, as here, the same."""
    place, log = tmp_path / "mnt", tmp_path / "log"
    place.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    syscalls.mount("test", str(place), "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
    try:
        negotiate(device)
        os.set_blocking(device, False)
        with log.open("wb") as stderr:
            program = Program(tmp_path, Options(), device=device, log=stderr.fileno())
            try:
                program.attach()
                with connections(tmp_path / "connections") as control:
                    (control / device_of(place).rpartition(":")[2] / "abort").write_text("1")
                assert program.wait() == 0
            finally:
                program.close()
        assert log.read_text() == ""
    finally:
        syscalls.umount2(str(place), 2)
        os.close(device)
