"""A source on sshfs, with an SFTP server on a pipe."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import mounted_on, wait_for

SFTP_SERVER = "/usr/lib/openssh/sftp-server"


def start_sshfs(root: Path, path: Path, *options: str) -> None:
    """Mount a directory of the server."""
    server = path.with_name("server")
    server.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
    server.chmod(0o755)
    # The shell has no copies of the files of this process.
    script = 'exec sshfs -o "ssh_command=$1" "host:$2" "$3" "${@:4}"'
    subprocess.run(["bash", "-c", script, "bash", server, root, path, *options], check=True)
    wait_for(lambda: mounted_on(path), bool)


@contextmanager
def sshfs(root: Path, path: Path, *options: str) -> Iterator[None]:
    """While the block runs, `root` is mounted on `path`."""
    path.mkdir(exist_ok=True)
    start_sshfs(root, path, *options)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)
