"""Software environments on a read-only mount: docs/ENVIRONMENTS.md."""

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, settle

MakeMount = Callable[..., Mount]
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBRARY = "int answer(void) { return 42; }\n"
PROGRAM = '#include <stdio.h>\nint answer(void);\nint main(void) { printf("%d\\n", answer()); return 0; }\n'
PACKAGE = """
import ctypes, importlib.util, json, mmap, os, sys
from package import part

def main():
    here = os.path.dirname(__file__)
    native = os.path.join(here, "libnative.so")
    with open(native, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        magic = mapped[:4].hex()
    absent = [importlib.util.find_spec(f"absent_{number}") for number in range(50)]
    print(json.dumps([part.VALUE, ctypes.CDLL(native).answer(), magic, absent.count(None), sys.prefix]))
"""
NOT_COPIED = ("__pycache__", "site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*", "lib2to3")


def compiled(output: Path, code: str, *arguments: object) -> None:
    subprocess.run(
        ["cc", "-x", "c", "-", "-x", "none", *map(str, arguments), "-o", output], input=code, text=True, check=True
    )


def make_venv(root: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)


def make_conda_like(root: Path) -> None:
    """An interpreter of its own, its standard library, and relative links, as conda and micromamba make them."""
    (root / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), root / "bin" / VERSION)
    for name in ("python", "python3"):
        (root / "bin" / name).symlink_to(VERSION)
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / "lib" / VERSION, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for path in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy2(path, root / "lib", follow_symlinks=False)


def package_of(root: Path) -> Path:
    """Debian's interpreter has dist-packages instead of site-packages outside of virtual environments."""
    return Path(start(root, "import site; print(site.getsitepackages()[0])", "-B")) / "package"


KINDS = {"venv": make_venv, "conda-like": make_conda_like}


@pytest.fixture(params=KINDS)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An environment with a package, a shared library behind a link, an entry point and a program."""
    root = tmp_path / "environment"
    KINDS[request.param](root)
    package = package_of(root)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "part.py").write_text("VALUE = 1\n")
    compiled(package / "libnative.so.1", LIBRARY, "-shared", "-fPIC")
    (package / "libnative.so").symlink_to("libnative.so.1")
    compiled(root / "bin/program", PROGRAM, package / "libnative.so.1", f"-Wl,-rpath,{package}")
    entry = root / "bin/tool"
    entry.write_text(f"#!{root}/bin/python\nimport package\npackage.main()\n")
    entry.chmod(0o755)
    settle()
    return root


def run(*command: object) -> str:
    """As a job starts it: no variable of Python's is set. Nothing may be said on stderr."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={}, cwd="/", check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def start(place: Path, statement: str, *options: str) -> str:
    return run(place / "bin/python", *options, "-c", statement).strip()


def expected(root: Path) -> str:
    return f'[1, 42, "7f454c46", 50, "{root}"]\n'


@pytest.mark.promise("TE-3", "PI-2")
def test_a_second_start_asks_the_source_for_nothing(mount: MakeMount, environment: Path) -> None:
    """The mount covers the source, so that entry points and activate scripts keep their paths."""
    before = contents(environment)
    m = mount(environment, "--read-only", name=".")
    assert run(m.path / "bin/tool") == expected(environment)
    assert run(m.path / "bin/program") == "42\n"
    first = m.flush()
    assert first["misses"] > 4 and sum(first["source_ops"].values()) > 60
    for _ in range(2):
        m.drop_caches()
        assert run(m.path / "bin/tool") == expected(environment)
        assert run(m.path / "bin/program") == "42\n"
    after = m.flush()
    assert after["source_ops"] == first["source_ops"] and after["hits"] > first["hits"] + 4
    m.umount()
    assert contents(environment) == before  # no .pyc was written, and none was tried


@pytest.mark.promise("CH-17")
@pytest.mark.parametrize(("options", "compares"), [(["--read-only"], True), (["--profile", "inference"], False)])
def test_after_a_remount_the_profile_inference_asks_for_nothing(
    mount: MakeMount, environment: Path, options: list[str], compares: bool
) -> None:
    m = mount(environment, *options, name=".")
    run(m.path / "bin/tool")
    m.flush()
    m.remount(*options)
    mounted = sum(m.ops().values())
    assert run(m.path / "bin/tool") == expected(environment)
    assert (sum(m.ops().values()) > mounted + 20) == compares and not m.ops().get("read")


def started_together(place: Path, count: int) -> Sequence[str]:
    processes = [
        subprocess.Popen(
            [place / "bin/tool"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={}, cwd="/"
        )
        for _ in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in processes]


def test_interpreters_that_start_together_fetch_each_file_once(mount: MakeMount, environment: Path) -> None:
    m = mount(environment, "--read-only", name=".")
    assert started_together(m.path, 1) == [expected(environment)]
    alone = m.flush()
    m.umount()
    shutil.rmtree(m.cache)
    m.start()
    assert started_together(m.path, 8) == [expected(environment)] * 8
    together = m.flush()
    # How much of a large file is read ahead depends on the timing.
    assert together["cached_files"] == alone["cached_files"]
    assert together["source_bytes"] == together["cached_bytes"], "nothing twice"


def test_compiled_files_are_used_and_stale_ones_are_not(mount: MakeMount, environment: Path) -> None:
    part = package_of(environment) / "part.py"
    compileall.compile_dir(part.parent, quiet=1)
    (part.parent / "stale.py").write_text("VALUE = 'old'\n")
    os.utime(part.parent / "stale.py", (1e9, 1e9))
    compileall.compile_file(part.parent / "stale.py", quiet=1)
    (part.parent / "stale.py").write_text("VALUE = 'newer'\n")
    settle()
    m = mount(environment, "--read-only")
    there = m.path / part.parent.relative_to(environment)
    code = "import sys; sys.path.insert(0, {!r}); from package import part, stale; print(part.VALUE, stale.VALUE)"
    done = subprocess.run(
        [m.path / "bin/python", "-v", "-c", code.format(str(there.parent))],
        capture_output=True, text=True, env={}, cwd="/", check=True,
    )  # fmt: skip
    assert done.stdout == "1 newer\n"
    assert f"# {there}/__pycache__/part.cpython" in done.stderr and " matches " in done.stderr
    assert "# bytecode is stale for 'package.stale'" in done.stderr


def test_an_environment_that_changes_is_seen_after_an_invalidation(mount: MakeMount, environment: Path) -> None:
    package = package_of(environment)
    m = mount(environment, "--read-only")
    code = "import importlib.util, package.part as part; print(part.VALUE, importlib.util.find_spec('added') is None)"
    assert start(m.path, code) == "1 True"
    (package / "part.py").write_text("VALUE = 'changed'\n")
    (package.parent / "added.py").write_text("")
    settle()
    assert start(m.path, code) == "1 True"
    cachefs("invalidate", m.path)
    assert start(m.path, code) == "changed False"


def test_a_set_user_id_program_gives_no_rights(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "environment"
    source.mkdir()
    shutil.copy(str(shutil.which("id")), source / "id")
    os.chown(source / "id", 0, 0)
    (source / "id").chmod(0o4755)
    settle()
    m = mount(source, "--read-only")
    assert (m.path / "id").stat().st_mode & 0o7777 == 0o4755  # shown as it is
    code = (
        "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); os.setgid(1000); os.setuid(1000); "
        "os.execve(fd, ['id', '-u'], {})"
    )
    effective = [run(sys.executable, "-c", code, root / "id").strip() for root in (source, m.path)]
    assert effective == ["0", "1000"]
