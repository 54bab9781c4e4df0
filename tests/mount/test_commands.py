"""What users of mount(8) and of other caches expect from the commands."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from daemon.cli import doctor, mount_helper
from daemon.cli.main import main
from tests.conftest import CLI, REPOSITORY, Mount, cachefs, contents, mounted_on, settle, wait_for
from tests.mount.test_cli import refused

MakeMount = Callable[..., Mount]


# --- mount and umount ------------------------------------------------------------------------------------------------


def test_mount_makes_its_mountpoint_only_if_all_else_is_well(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "made"
    cachefs("mount", source, place, "--cache-dir", tmp_path / "cache")
    assert (place / "d0").is_dir()
    cachefs("umount", place)
    assert os.listdir(place) == [] and place.stat().st_mode & 0o777 == 0o755
    other = tmp_path / "other"
    assert "inside the source" in refused("mount", source, other, "--cache-dir", source / "cache")
    assert "cannot be used: No such file" in refused("mount", tmp_path / "no source", other)
    assert not other.exists()
    assert "its parent is no directory" in refused("mount", source, other / "deeper", "--cache-dir", tmp_path / "c")


def test_options_as_mount_8_writes_them(mount: MakeMount, source: Path) -> None:
    options = "ro,noatime,_netdev,cache-size=12M,source_timeout=2m,mutable=*.log"
    m = mount(source, "-o", options, "--cache-size", "10M", "-o", "mutable=*.txt")
    shown = json.loads(cachefs("config", "show", m.path, "--json").stdout)
    assert {name: shown[name]["value"] for name in ("read-only", "cache-size", "source-timeout", "mutable")} == {
        "read-only": True, "cache-size": "10M", "source-timeout": 120.0, "mutable": ["*.log", "*.txt"],
    }  # fmt: skip
    assert shown["cache-size"]["origin"] == "command line"
    said = refused("mount", "-o", "cache-sise=1G", source, m.path, status=2)
    assert "-o cache-sise: no such option; did you mean cache-size?" in said
    assert mount_helper.arguments(["/a", "/b", "-o", options]) == ["-o", options, "--", "/a", "/b"]


AS_FROM_FSTAB = r"""
helper=$1 disk=$2 source=$3 place=$4 cache=$5
mount -t tmpfs tmpfs $disk && mkdir $disk/upper $disk/work
mount -t overlay -o lowerdir=/usr/sbin,upperdir=$disk/upper,workdir=$disk/work overlay /usr/sbin
cp $helper /usr/sbin/mount.fuse.cachefs
try() { echo "== $*"; mount -t fuse.cachefs "$@" 2>&1; echo "status $?"; }
try -o ro,remount,noexec $source $place
for option in dirsync sync strictatime nosuchoption; do try -o ro,$option,cache-dir=$cache $source $place; done
try --fake -o ro,cache-dir=$cache $source $place
mountpoint -q $place && echo "something is mounted"
try -o ro,lazytime,silent,nonempty,nofail,X-mount.mkdir,noexec,nosymfollow,cache-dir=$cache $source $place/made
findmnt -no OPTIONS $place/made
$place/made/program; cat $place/made/link
mount -o remount,exec $place/made; findmnt -no OPTIONS $place/made
umount $place/made; try -o user,cache-dir=$cache $source $place; findmnt -no OPTIONS $place
umount $place; try -o user,exec,cache-dir=$cache $source $place; findmnt -no OPTIONS $place; $place/program
umount $place
"""


@pytest.mark.promise("PE-19")
def test_mount_8_with_options_of_fstab(source: Path, tmp_path: Path) -> None:
    """Each is honoured, or refused with one line. Regression: noexec was ignored."""
    (source / "program").write_text("#!/bin/sh\necho it ran\n")
    (source / "program").chmod(0o755)
    helper = tmp_path / "helper"
    command = f"{shlex.quote(sys.executable)} -c 'from daemon.cli.mount_helper import main; main()'"
    helper.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {command} "$@"\n')
    helper.chmod(0o755)
    for name in ("disk", "place"):
        (tmp_path / name).mkdir()
    places = [helper, tmp_path / "disk", source, tmp_path / "place", tmp_path / "cache"]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", AS_FROM_FSTAB, "bash", *places], capture_output=True, text=True, timeout=120
    )
    tries = done.stdout.split("== ")[1:]
    remount, *refusals, fake, honoured, user, user_exec = [each.splitlines()[1:] for each in tries]
    assert "cannot be remounted" in remount[0] and remount[1:] == ["status 1"], done
    for option, said in zip(("dirsync", "sync", "strictatime", "nosuchoption"), refusals, strict=True):
        assert said[0].startswith(f"mount.fuse.cachefs: -o {option}: ") and said[1:] == ["status 1"], said
    assert fake == ["status 0"]
    assert honoured[0] == "status 0", done
    first, second = (set(line.split(",")) for line in honoured[1:])
    assert {"ro", "nosuid", "nodev", "noexec", "nosymfollow"} <= first == second
    assert "program: Permission denied" in done.stderr and "link: Too many levels" in done.stderr
    assert user[0] == "status 0" and "noexec" in user[1].split(",")
    assert user_exec[0] == "status 0" and "noexec" not in user_exec[1].split(",") and user_exec[2:] == ["it ran"]


@pytest.mark.promise("PE-19")
@pytest.mark.fastpath
def test_a_mount_keeps_its_flags_when_it_is_taken_over(mount: MakeMount, source: Path) -> None:
    m = mount(source, "-o", "noexec")
    assert os.statvfs(m.path).f_flag & os.ST_NOEXEC
    m.kill()
    with pytest.raises(AssertionError, match="was mounted with other options"):
        m.start("--exec")
    m.start()
    assert os.statvfs(m.path).f_flag & os.ST_NOEXEC
    assert contents(m.path) == contents(source)


def test_options_that_cachefs_mount_alone_cannot_honour(source: Path, tmp_path: Path) -> None:
    assert "-o suid: a cachefs is always nosuid" in refused("mount", "-o", "suid", source, tmp_path / "p", status=2)
    assert "-o X-mount.mkdir: mount(8) does that" in refused(
        "mount", "-o", "ro,X-mount.mkdir", source, tmp_path / "place", status=2
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5), ("5s", 5), ("2m", 120), ("1h", 3600), ("500ms", 0.5), ("1.5d", 129600)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    from daemon.config.parameters import MILLISECONDS, SECONDS

    assert SECONDS.convert(text, None, None) == seconds
    assert MILLISECONDS.convert(text, None, None) == (5 if text == "5" else seconds * 1000)


def test_a_cache_size_of_nothing_and_one_beyond_the_disk(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    said = refused("mount", source, tmp_path / "place", "--cache-size", "0", status=2)
    assert "a cache needs room" in said
    done = cachefs("mount", source, tmp_path / "place", "--cache-dir", tmp_path / "cache", "--cache-size", "900T")
    assert done.stderr.startswith("cachefs: the cache size, 900 TiB, is more than the whole disk of ")
    assert done.stderr.count("\n") == 1
    cachefs("umount", tmp_path / "place")


def test_places_that_would_do_harm(source: Path, tmp_path: Path) -> None:
    cache, place = tmp_path / "cache", tmp_path / "place"
    place.mkdir()
    assert "is inside the source" in refused("mount", source, place, "--cache-dir", source / "cache")
    (cache / "inside").mkdir(parents=True)
    assert "is inside the cache directory" in refused("mount", source, cache / "inside", "--cache-dir", cache)
    assert "is inside the cache directory" in refused("mount", cache / "inside", place, "--cache-dir", cache)
    assert not mounted_on(place) and os.listdir(cache) == ["inside"]


@pytest.mark.promise("LC-24")
def test_a_lazy_umount_lets_jobs_keep_their_files(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    expected = (source / "d0/f00000").read_bytes()
    with open(m.path / "d0/f00000", "rb") as opened:
        cachefs("umount", "--lazy", m.path)
        assert not mounted_on(m.path)
        assert opened.read() == expected
    wait_for(m.log, lambda log: f"unmounted {m.path}; all data are on disk" in log)
    m.pid = 0


@pytest.mark.promise("LC-25")
def test_a_forced_umount_ends_a_mount_that_is_in_use(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    with open(m.path / "d0/f00000", "rb") as opened:
        assert "in use" in refused("umount", m.path)
        assert refused("umount", m.path, "--lazy", "--force", status=2)
        cachefs("umount", "--force", m.path)
        with pytest.raises(OSError):
            os.fstat(opened.fileno())
            os.pread(opened.fileno(), 1, 0)
    assert not mounted_on(m.path) and "unmounted" in m.log()
    m.pid = 0


# --- errors name the path --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["info", "unpin", "evict", "pin", "warmup", "warmup --check", "warmup --background"]
)
def test_a_missing_path_is_an_error_that_names_it(mount: MakeMount, source: Path, command: str) -> None:
    m = mount(source)
    assert refused(*command.split(), m.path / "no such") == f"cachefs: {m.path}/no such: No such file or directory\n"


def test_a_partial_warm_up_is_never_all(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    done = cachefs("warmup", m.path / "d0", m.path / "no such", check=False)
    assert done.returncode == 1 and "100" not in done.stdout and "; 1 error\n" in done.stdout
    assert f"cachefs: {m.path}/no such: No such file" in done.stderr


def test_config_check_speaks_of_the_file_and_checks_its_paths(source: Path, tmp_path: Path) -> None:
    file, place = tmp_path / "set.toml", tmp_path / "place"

    def write(**values: object) -> None:
        lines = {"source": str(source), "mountpoint": str(place), "cache-dir": str(tmp_path / "cache")} | {
            name.replace("_", "-"): value for name, value in values.items()
        }
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))

    write()
    assert cachefs("config", "check", file).stdout == f"{file}: valid\n"
    assert json.loads(cachefs("config", "check", file, "--json").stdout)["valid"] is True
    assert not place.exists() and not (tmp_path / "cache").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    for values, message in (
        ({"source": str(tmp_path / "nothing")}, f"the source {tmp_path}/nothing cannot be used: No such file"),
        ({"mountpoint": str(place / "deeper")}, f"the mountpoint {place}/deeper cannot be made: its parent is no"),
        ({"cache_dir": str(source / "c")}, "is inside the source"),
        ({"cache_dir": str(tmp_path / "mine")}, "is not empty and not a cache directory"),
        ({"metrics": f"{tmp_path}/nothing/sock"}, f"{tmp_path}/nothing: No such file"),
        ({"read_only": True, "metadata_snapshot": f"{tmp_path}/absent"}, f"{tmp_path}/absent: No such file"),
    ):
        write(**values)
        said = refused("config", "check", file)
        assert said.startswith(f"cachefs: {file}: ") and message in said
    write(cache_sise="1G")
    said = refused("config", "check", file, status=2)
    assert said == f"cachefs: {file}, line 4: 'cache-sise' is not an option: did you mean 'cache-size'?\n"


@pytest.mark.parametrize("over_source", [False, True])
def test_config_check_of_a_mount_that_exists(mount: MakeMount, source: Path, tmp_path: Path, over_source: bool) -> None:
    """Before: "valid" for a file whose source is missing, if anything was mounted on its mountpoint."""
    m = mount(source, name="." if over_source else "mnt")
    file = tmp_path / "set.toml"
    for given, said in (source, "valid"), (tmp_path / "nothing", f"the source {tmp_path}/nothing cannot be used: No"):
        file.write_text(f'source = "{given}"\nmountpoint = "{m.path}"\ncache-dir = "{tmp_path}/other"\n')
        done = cachefs("config", "check", file, check=False)
        assert said in done.stdout + done.stderr, done


def test_commands_find_what_a_mount_uses_from_any_directory(source: Path, tmp_path: Path) -> None:
    """Paths of the command line may be relative. Before: `verify`, `snapshot export` and `doctor` took them as relative
    to their own directory, and so the cache of another mount, or the mount for its source."""
    options = ["--cache-dir", "cache", "--minimum-age", "0.1"]
    for name in "one", "two":
        (tmp_path / name).mkdir()
        shutil.copytree(source, tmp_path / name / "source", symlinks=True)
    (tmp_path / "two/source/d0/f00000").unlink()
    settle()
    one, two = tmp_path / "one", tmp_path / "two"
    with ExitStack() as stack:
        for directory in one, two:
            cachefs("mount", "source", "source", *options, cwd=directory)
            stack.callback(cachefs, "umount", directory / "source")
        cachefs("warmup", one / "source")
        shown = json.loads(cachefs("config", "show", one / "source", "--json").stdout)
        values = [shown[key]["value"] for key in ("source", "mountpoint", "cache-dir")]
        assert values == [str(one / "source"), str(one / "source"), str(one / "cache")]
        verified = json.loads(cachefs("verify", one / "source", "--json", cwd=two).stdout)
        assert verified["records"] == 40
        done = cachefs("snapshot", "export", one / "source", tmp_path / "snapshot", "--json", cwd=two)
        assert json.loads(done.stdout)["names"] > 40
        for place in two / "source", two / "source/d0":
            done = cachefs("doctor", place, "--json", cwd=one, check=False)
            findings = {each["name"]: each["value"] for each in json.loads(done.stdout)}
            assert findings["cache disk"].startswith(f"{two}/cache, ") and "source latency" not in findings
        for path in (two / "source").rglob("f*"):
            path.write_bytes(b"doctor has made nothing immutable")


def test_a_restart_without_the_fast_path_is_refused_when_checked_too(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--no-fastpath")
    for arguments in ("restart", m.path, "--check"), ("restart", m.path):
        assert "is mounted without the fast path" in refused(*arguments)
    assert contents(m.path) == contents(source)


def test_invalidate_says_what_it_dropped(mount: MakeMount, source: Path) -> None:
    """Before: "0 dropped" for a name that was never asked for."""
    m = mount(source, "--read-only")
    (m.path / "d0/f00000").read_bytes()
    for name, said in ("d0/f00000", "1 files and directories dropped"), ("d1/f00000", "nothing of it was cached"):
        done = cachefs("invalidate", m.path / name)
        assert done.stdout == f"{m.path / name}: {said}; the next use asks the source\n"


# --- what is said ----------------------------------------------------------------------------------------------------


def test_info_explains_the_state_in_one_sentence(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--mutable", "d3/**")
    (m.path / "d0/f00000").read_bytes()
    (m.path / "written").write_bytes(b"x")
    for path, words in (
        ("d0/f00000", "it was opened for reading, warmed up or pinned"),
        ("written", "it was written through this mount"),
        ("d3/f00003", "--mutable matches its path"),
        ("d0/f00004", "no job has opened it for reading"),
        ("d0", "it is on the path to a pinned file"),
    ):
        assert words in " ".join(cachefs("info", m.path / path).stdout.split())
        assert "\n" not in json.loads(cachefs("info", m.path / path, "--json").stdout)["reason"]
    n = mount(source, "--cache", "none", name="none")
    assert "--cache none" in cachefs("info", n.path / "d0/f00000").stdout
    r = mount(source, "--read-only", name="ro")
    assert "the mount is read-only" in cachefs("info", r.path / "d0/f00000").stdout


def test_sizes_appear_in_the_unit_in_which_they_were_given(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--cache-size", "1536M", "--small-file", "0.5MiB")
    assert " of 1.5 GiB" in cachefs("status", m.path).stdout
    shown = json.loads(cachefs("config", "show", m.path, "--json").stdout)
    assert (shown["cache-size"]["value"], shown["small-file"]["value"]) == ("1536M", "0.5MiB")


@pytest.mark.fastpath
@pytest.mark.usefixtures("fusectl")
def test_the_log_has_start_take_over_and_umount_and_nothing_else(mount: MakeMount, source: Path) -> None:
    import cachefs as package

    m = mount(source, "--read-only", "--cache-size", "50M")
    contents(m.path)
    m.flush()
    cachefs("restart", m.path)
    m.umount()
    lines = [line.split(": ", 1)[1] for line in m.log().splitlines()]
    options = f"cache-dir={m.cache}, cache-size=50M, read-only=True"
    start = f"cachefs {package.__version__}: {source} on {m.path}; options: {options}"
    assert [line for line in lines if "minimum-age" not in line] == [
        start,
        "leaving the mount to the next daemon",
        start,
        f"taking over the mount on {m.path}",
        f"unmounted {m.path}; all data are on disk",
    ]


@pytest.mark.fastpath
@pytest.mark.usefixtures("interpreters")
def test_ps_shows_a_restarted_daemon_as_its_mount(mount: MakeMount, source: Path) -> None:
    def shown() -> str:
        return subprocess.check_output(["ps", "-ww", "-o", "args=", "-p", str(m.pid)], text=True).strip()

    m = mount(source, "--read-only", "--cache-size", "50M")
    before = shown()
    assert " mount " in before and str(m.path) in before
    for _ in range(2):
        cachefs("restart", m.path)
        m.pid = m.status()["pid"]
        assert shown() == before
    assert contents(m.path) == contents(source)


@pytest.mark.fastpath
def test_a_dead_daemon_is_restarted_as_the_advice_says(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    m.kill()
    advice = re.search(r"run cachefs (restart \S+),", refused("status", m.path))
    assert advice is not None
    cachefs(*advice[1].split())
    m.pid = m.status()["pid"]
    assert contents(m.path) == contents(source)


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_has_no_advice_that_does_not_apply(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    shell = ["sh", "-c", 'ulimit -n 500 && exec "$@"', "sh", *CLI, "doctor"]
    for place in ([], [str(m.path)]):
        done = subprocess.run([*shell, *place, "--json"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        findings = {each["name"]: each for each in json.loads(done.stdout)}
        assert not findings.get("open files", {"advice": ""})["advice"]
        assert done.returncode == bool([each for each in findings.values() if each["advice"]])
    limit = resource.prlimit(m.pid, resource.RLIMIT_NOFILE)[0]
    assert re.fullmatch(rf"\d+ of {limit:,}", findings["open files"]["value"])


def test_doctor_exits_with_0_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is: its slow parts are left out."""
    from click.testing import CliRunner

    monkeypatch.setattr(doctor, "SLOW_DISK_MB", 0)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == ("!" in done.output) == 0, done.output


def test_the_flag_of_a_virtual_disk_says_nothing(tmp_path: Path) -> None:
    for place, is_partition, rotates in (
        ("pci0/virtio1/block/vda", False, False),
        ("pci0/virtio1/block/vda/vda1", True, False),
        ("vbd-51712/block/xvda", False, False),
        ("pci0/ata1/host0/block/sda", False, True),
        ("pci0/ata1/host0/block/sda/sda1", True, True),
    ):
        device = tmp_path / place
        device.mkdir(parents=True, exist_ok=True)
        queue = (device.parent if is_partition else device) / "queue"
        queue.mkdir(exist_ok=True)
        (queue / "rotational").write_text("1\n")
        if is_partition:
            (device / "partition").write_text("1\n")
        assert doctor.turns(device) is rotates, place
    (tmp_path / "pci0/ata1/host0/block/sda/queue/rotational").write_text("0\n")
    assert doctor.turns(tmp_path / "pci0/ata1/host0/block/sda/sda1") is False


# --- completion ------------------------------------------------------------------------------------------------------


def test_completion_completes_mountpoints_and_paths(mount: MakeMount, source: Path) -> None:
    m = mount(source)

    def completed(line: str) -> list[str]:
        asked = os.environ | {
            "_CACHEFS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)
        }  # fmt: skip
        script = 'from daemon.cli.main import main; main(prog_name="cachefs")'
        done = subprocess.run(
            [sys.executable, "-c", script], env=asked, cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    beginning = str(m.path)[:-1]
    for command in ("status", "umount", "restart", "verify", "config show", "snapshot export"):
        assert completed(f"cachefs {command} {beginning}") == [f"plain,{m.path}"], command
    assert completed("cachefs umount /nowhere") == ["dir,/nowhere"]
    assert completed(f"cachefs mount {beginning}") == [f"dir,{beginning}"]
    for command in ("info", "warmup", "evict", "doctor"):
        assert completed(f"cachefs {command} /tm") == ["file,/tm"]
