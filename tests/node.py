"""A node on which cachefs is installed as a package, with a stand-in for the package: it leads to this checkout."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import CLI, REPOSITORY

SEPARATE = ("/etc", "/opt", "/usr", "/var")
"""What an installation changes."""
COMMAND = f'#!/bin/sh\ncd {REPOSITORY} && exec {" ".join(CLI)} "$@"\n'


def fill_root(root: Path) -> None:
    """The files of the package."""
    commands, units = root / "opt/cachefs/bin", root / "lib/systemd/system"
    for directory in (commands, units):
        directory.mkdir(parents=True)
    (commands / "cachefs").write_text(COMMAND)
    (commands / "cachefs").chmod(0o755)
    (commands / "python3").symlink_to(sys.executable)
    (units / "cachefs@.service").write_text((REPOSITORY / "systemd/cachefs@.service").read_text())


def package(directory: Path, version: str, *, depends: str = "") -> Path:
    """Build the package in `directory`."""
    directory.mkdir(exist_ok=True)
    built = directory / "cachefs.deb"
    fields = {"Package": "cachefs", "Version": version, "Architecture": "all", "Maintainer": "tests <tests@localhost>"}
    fields |= {"Depends": depends} if depends else {}
    fields |= {"Description": "cachefs for tests"}
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        fill_root(root)
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
        root.chmod(0o755)
        subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, built], check=True, capture_output=True)
    return built
