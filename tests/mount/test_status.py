"""`cachefs status`: one mount, all mounts, and daemons of other users."""

import json
import os
import pwd
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from daemon.cli import status
from tests.conftest import CLI, Mount, cachefs, contents, wait_for
from tests.mount.test_cli import refused
from tests.processes import start
from tests.terminal import Terminal

MakeMount = Callable[..., Mount]


def row_of(mounted: Mount) -> dict[str, object]:
    rows = json.loads(cachefs("status", "--json").stdout)
    (found,) = [row for row in rows if row["mountpoint"] == str(mounted.path)]
    return dict(found)


def test_status_lists_all_mounts_alive_and_dead(mount: MakeMount, source: Path) -> None:
    alive, dead = mount(source, "--cache-size", "10M", name="alive"), mount(source, name="dead")
    contents(alive.path)
    dead.kill()
    text = cachefs("status")
    (line,) = [line for line in text.stdout.splitlines() if line.startswith(f"{alive.path} ")]
    assert re.fullmatch(rf"{alive.path} +{source} +alive +0\.0 % +\d+\.\d % of 10 MiB *( 0 *)?", line), line
    (line,) = [line for line in text.stdout.splitlines() if line.startswith(f"{dead.path} ")]
    assert line.split()[1:5] == [str(source), "dead", "-", "-"]
    assert f"the daemon of {dead.path} has died: run cachefs restart {dead.path}" in text.stderr
    row = row_of(alive)
    assert row["state"] == "alive" and row["status"]["pid"] == alive.pid  # type: ignore[index]
    assert row_of(dead) | {"user": 0, "state": "dead", "status": None} == row_of(dead)


def test_root_sees_the_mounts_of_users(user: pwd.struct_passwd, source: Path, tmp_path: Path) -> None:
    from tests.users import cachefs_as, open_to_all

    uid, gid = user.pw_uid, user.pw_gid
    home = tmp_path / "home"
    (home / "place").mkdir(parents=True)
    for path in (home, home / "place"):
        os.chown(path, uid, gid)
    open_to_all(source / "d0")
    open_to_all(home / "place")
    source.chmod(0o755)
    (source / "d0").chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(home / "cache")}  # the runtime directory is /tmp/cachefs-UID
    done = cachefs_as(uid, gid, environment, "mount", source, home / "place")
    assert done.returncode == 0, done.stderr
    try:
        (row,) = [row for row in json.loads(cachefs("status", "--json").stdout) if row["user"] == uid]
        assert (row["mountpoint"], row["source"], row["state"]) == (str(home / "place"), str(source), "alive")
        assert f"{source} " in cachefs("status", home / "place").stdout
        rows = json.loads(cachefs_as(uid, gid, environment, "status", "--json").stdout)
        assert {row["state"] for row in rows if row["user"] == uid} == {"alive"}
        assert {row["state"] for row in rows if row["user"] == 0} <= {"private"}
    finally:
        done = cachefs_as(uid, gid, environment, "umount", home / "place")
    assert done.returncode == 0, done.stderr


FIGURES = {"blob_bytes": 1, "cache_size_bytes": 2, "hits": 1, "misses": 1}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        FIGURES | {"blob_bytes": 10**400},
        FIGURES | {"hits": "1"},
        FIGURES | {"more": json.loads("[" * 400 + "]" * 400)},
    ],
    ids=["empty", "a list", "too large", "not a number", "nested"],
)
def test_a_daemon_of_another_user_cannot_spoil_the_list_of_root(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a traceback in place of the list."""

    class Answering:
        mountpoint = "/mnt"

        def status(self) -> object:
            return answer

    monkeypatch.setattr(status, "client_of", lambda *_, **__: Answering())
    row = status.Listed("/mnt", "/src", 1000)
    row.ask()
    assert row.state == "another version" and row.status is None
    with pytest.raises(CacheFsError, match="runs another version"):
        status._checked(Answering())  # type: ignore[arg-type]


def test_status_of_a_path_on_a_mount(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    assert json.loads(cachefs("status", m.path / "d0/f00000", "--json").stdout)["mountpoint"] == str(m.path)
    assert "no cachefs is mounted on" in refused("status", m.path.parent)


@pytest.mark.parametrize("of", ["one", "all"])
def test_status_prints_a_line_of_json_a_second_into_a_pipe(mount: MakeMount, source: Path, of: str) -> None:
    m = mount(source)
    watching = start("status", *([m.path] if of == "one" else []), "--watch", "--json", "--interval", "0.2")
    assert watching.stdout is not None
    for _ in range(3):
        assert select.select([watching.stdout], [], [], 30)[0]
        answer = json.loads(watching.stdout.readline())
        (found,) = [answer] if of == "one" else [row for row in answer if row["mountpoint"] == str(m.path)]
        assert found["source"] == str(source)
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=30)
    assert (watching.returncode, said) == (130, "")


def test_status_watches_the_list_on_a_terminal(
    mount: MakeMount, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    m = mount(source, name="m")
    terminal = Terminal(tmp_path, [*CLI, "status", "--watch", "--interval", "0.2"])
    request.addfinalizer(terminal.close)
    wait_for(terminal.screen, lambda screen: "alive" in screen and "hit ratio" in screen)
    contents(m.path)


def test_a_client_that_is_told_the_owner_refuses_other_daemons(mount: MakeMount, source: Path) -> None:
    """Root asks a socket that another user may have replaced."""
    from cachefs.client import locations
    from cachefs.errors import CacheFsError

    m = mount(source)
    directory = locations.mount_directory(str(m.path))
    assert Client(m.path, directory=directory, owner=0).status()["pid"] == m.pid
    with pytest.raises(CacheFsError, match="it belongs to user 0, and the mount to user 1000"):
        Client(m.path, directory=directory, owner=1000).status()
