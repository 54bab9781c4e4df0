"""What the Debian package contains."""

import gzip
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from daemon.cli.main import main
from tests.conftest import REPOSITORY
from tests.packages.conftest import built

pytestmark = [pytest.mark.packages, pytest.mark.slow]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package")
    subprocess.run(["dpkg-deb", "-x", built("cachefs_*_*.deb"), directory], check=True)
    return directory


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            yield from commands(each, f"{name}-{below}")


def test_nothing_names_the_machine_that_built_it(unpacked: Path) -> None:
    places = {str(REPOSITORY), sys.prefix, sys.base_prefix}
    pattern = re.compile("|".join(re.escape(place) + "/" for place in places if place != "/usr").encode())
    files = [path for path in unpacked.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 1000 and [str(path) for path in files if pattern.search(path.read_bytes())] == []


def test_modules_are_compiled_for_their_place(unpacked: Path) -> None:
    """Otherwise root's first start would write files that no package owns."""
    (module,) = unpacked.glob("opt/cachefs/lib/python3*/site-packages/cachefs/client/__init__.py")
    (compiled,) = module.parent.glob("__pycache__/__init__.*.pyc")
    assert f"/{module.relative_to(unpacked)}".encode() in compiled.read_bytes()
    assert int.from_bytes(compiled.read_bytes()[8:12], "little") == int(module.stat().st_mtime)


def test_each_command_has_a_man_page_with_its_options(unpacked: Path, tmp_path: Path) -> None:
    pages = 0
    for name, command in commands(main, "cachefs"):
        page = tmp_path / f"{name}.1"
        page.write_bytes(gzip.decompress((unpacked / f"usr/share/man/man1/{name}.1.gz").read_bytes()))
        shown = subprocess.run(["mandoc", "-Tascii", page], capture_output=True, text=True, check=True).stdout
        text = re.sub(".\b", "", shown)
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0] in text, (name, parameter.opts)
        pages += 1
    assert pages > 20
    checked = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", *tmp_path.glob("*.1")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_the_example_configuration_is_valid(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    text = (unpacked / "etc/cachefs/example.toml").read_text()
    text = text.replace("/ceph/imagenet", f"{tmp_path}/source").replace("/data/imagenet", f"{tmp_path}/mnt")
    text = text.replace("/ssd/cachefs", f"{tmp_path}/ssd").replace("# cache-dir", "cache-dir").replace("# met", "met")
    text = text.replace("500G", "500M")
    file = tmp_path / "example.toml"
    file.write_text(text)
    checked = subprocess.run(
        [sys.executable, "-m", "daemon", "config", "check", file], cwd=REPOSITORY, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert checked.returncode == 0 and "metrics = " in text, checked.stderr


def test_a_wheel_of_another_version_than_the_changelog_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "cachefs_ml-9.9-py3-none-any.whl"
    build = [REPOSITORY / "packaging/deb/build", wheel]
    done = subprocess.run([*map(str, build)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "packaging/deb/changelog" in done.stderr and done.stderr.count("\n") == 1


def test_lintian_finds_no_error(package: Path) -> None:
    done = subprocess.run(["lintian", "--fail-on", "error", package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
