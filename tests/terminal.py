"""A real terminal, of 80 columns and 24 lines, for programs that draw on one."""

import subprocess
from pathlib import Path

from tests.conftest import REPOSITORY


class Terminal:
    """A terminal of 80 by 24 that a program runs in, in tmux."""

    def __init__(self, tmp_path: Path, command: list[object]) -> None:
        self._socket = str(tmp_path / "tmux")
        line = " ".join(f"'{part}'" for part in command)
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", f"cd {REPOSITORY} && {line}; sleep 60")

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=True
        ).stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def close(self) -> None:
        self._tmux("kill-server")
