"""Writes one request of each FUSE operation into a directory, for the fuzzer to start from."""

import struct
import sys
from pathlib import Path

for opcode in range(1, 53):
    for names in (b"", b"name\0", b"name\0other\0"):
        body = bytes(64) + names if opcode % 2 else names
        header = struct.pack("<2I2Q4I", 40 + len(body), opcode, 2, 1, 0, 0, 0, 0)
        Path(sys.argv[1], f"{opcode}-{len(names)}").write_bytes(header + body)
