"""docs/deploy/kubernetes.yaml: its schema, and the script of its pod on a node with a real systemd."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.conftest import REPOSITORY, contents, free_port, make_files, settle, wait_for
from tests.machine import Machine, machine
from tests.mount.test_service import READ
from tests.node import SEPARATE, package

MANIFEST = REPOSITORY / "docs/deploy/kubernetes.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))
CONFIGURATION: dict[str, str] = OBJECTS[0]["data"]
VERSIONS = ("1.27", "1.30", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_follows_the_schema(version: str) -> None:
    assert [each["kind"] for each in OBJECTS] == ["ConfigMap", "DaemonSet", "Job"]
    for each in OBJECTS:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_manifest_with_a_wrong_name_is_noticed() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(OBJECTS[1]).replace("hostPID", "hostPid"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_pod_has_no_mount_to_lose() -> None:
    pod = OBJECTS[1]["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "configuration", "configMap": {"name": "cachefs"}}]
    assert "metrics" not in "".join(
        line for text in CONFIGURATION.values() for line in text.splitlines() if not line.strip().startswith("#")
    )  # off by default


def test_the_script_needs_only_what_is_in_every_image() -> None:
    text = CONFIGURATION["node.sh"]
    own = re.sub(r"on_node [^|&;\n]*", "", text)
    used = {name for name in ("nsenter", "dpkg-deb", "ls", "cat", "sha256sum", "touch", "rm", "sleep") if name in own}
    assert len(used) == 8
    for name in used:
        path = os.path.realpath(str(shutil.which(name)))
        owner = subprocess.run(
            ["dpkg", "--search", f"*{path.removeprefix('/usr')}"], capture_output=True, text=True, check=True
        ).stdout.split(":")[0]
        shown = ["dpkg-query", "--show", "--showformat", "${Essential}", owner]
        assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == "yes", name
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


# --- on a node -------------------------------------------------------------------------------------------------------


class Node:
    """A node, the source of a dataset, and what the pod is given."""

    def __init__(self, directory: Path, m: Machine) -> None:
        self.machine = m
        self.source, self.place = directory / "dataset", directory / "mounts" / "set"
        self.configuration, self.packages = directory / "configuration", directory / "packages"
        self.configuration.mkdir()
        self.script = self.configuration / "node.sh"
        self.script.write_text(CONFIGURATION["node.sh"])
        package(self.packages, "1.0")
        self.configure()

    def configure(self, *changes: tuple[str, str]) -> None:
        """The mount of the manifest, elsewhere."""
        text = CONFIGURATION["imagenet.toml"]
        cache = self.place.parent.with_name("cache")
        for old, new in (
            ("/mnt/ceph/imagenet", str(self.source)),
            ("/mnt/cachefs/imagenet", str(self.place)),
            ("/var/cache/cachefs/imagenet", str(cache)),
            ("500G", "1G"),
            *changes,
        ):
            assert old in text
            text = text.replace(old, new)
        (self.configuration / "set.toml").write_text(text)

    def pod(self, *arguments: str) -> list[str]:
        """The command line of the pod: it sees the processes of the node, and has mounts of its own."""
        command = ["unshare", "--mount", "--propagation", "private", "sh", str(self.script)]
        return self.machine.enter(*command, str(self.configuration), str(self.packages), *arguments)

    def once(self, *, fails: bool = False) -> str:
        """One round of the pod. What it says."""
        done = subprocess.run(self.pod(), capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == int(fails) and "Traceback" not in done.stderr, (done, self.machine.log.read_text())
        return done.stderr

    def status(self) -> dict[str, Any]:
        done = self.machine.run("/opt/cachefs/bin/cachefs", "status", self.place, "--json")
        return dict(yaml.safe_load(done.stdout)) if done.returncode == 0 else {}

    @property
    def pid(self) -> str:
        return self.machine.show("MainPID")

    def read(self) -> dict[Path, bytes]:
        """The dataset as a job on the node sees it."""
        return contents(Path(f"/proc/{self.machine.pid}/root{self.place}"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    make_files(tmp_path / "dataset", 200, (1, 30_000), directories=4)
    settle()
    with machine(tmp_path, SEPARATE) as m:
        yield Node(tmp_path, m)


pytestmark = pytest.mark.full_age


@pytest.mark.slow
@pytest.mark.fastpath
def test_an_update_of_the_pod_is_a_take_over(node: Node, tmp_path: Path) -> None:
    m = node.machine
    said = node.once()  # it makes the mountpoint, too
    assert "installing cachefs 1.0" in said and "cachefs@set.service was started" in said
    assert node.read() == contents(node.source)
    assert m.show("UnitFileState") == "enabled" and m.show("NFileDescriptorStore") == "4"
    first = node.pid
    assert node.once() == "" and node.pid == first  # nothing has changed
    stop = tmp_path / "stop"
    reader = subprocess.Popen(
        m.enter(sys.executable, "-c", READ, node.place, stop), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(Path(f"{stop}.started").exists, bool)
    # A pod that is killed, with all its processes, takes nothing along.
    ready = tmp_path / "ready"
    pod = subprocess.Popen(node.pod(str(ready)), start_new_session=True)
    wait_for(ready.exists, bool)
    os.killpg(pod.pid, signal.SIGKILL)
    pod.wait(20)
    assert node.pid == first
    # The next pod has another version.
    package(node.packages, "2.0")
    said = node.once()
    assert "installing cachefs 2.0" in said and "a new daemon takes over" in said
    second = node.pid
    assert second not in (first, "0") and m.show("NFileDescriptorStore") == "4"
    assert m.run("dpkg-query", "--show", "--showformat", "${Version}", "cachefs").stdout == "2.0"
    # A change of the configuration is one, too.
    node.configure(("1G", "2G"))
    node.once()
    assert node.pid not in (second, "0") and node.status()["cache_size_bytes"] == 2 << 30
    stop.touch()
    read, wrong = reader.communicate(timeout=90)
    assert reader.returncode == 0 and int(read) > 200, wrong
    # What an administrator stops, or what dies for good, is started again.
    m.systemctl("stop", "cachefs@set")
    assert "was started" in node.once()
    # Removed from the configuration: unmounted, and not mounted at the next boot.
    (node.configuration / "set.toml").unlink()
    assert "unmounting" in node.once()
    assert m.show("ActiveState") == "inactive" and m.show("UnitFileState") == "disabled"
    assert str(node.place) not in m.run("cat", "/proc/self/mountinfo").stdout
    assert m.run("ls", "/etc/cachefs").stdout == "" and node.once() == ""


@pytest.mark.slow
@pytest.mark.fastpath
def test_what_cannot_be_applied_leaves_the_mount_alone(node: Node, tmp_path: Path) -> None:
    m = node.machine
    node.once()
    pid = node.pid

    def refused(*words: str) -> None:
        said = node.once(fails=True)
        assert all(word in said for word in words), said
        assert node.pid == pid and node.read() == contents(node.source)

    kept = m.run("cat", "/etc/cachefs/set.toml").stdout
    node.configure(("read-only", "raed-only"))
    refused("raed-only", "set: not applied")
    node.configure((str(node.place), str(tmp_path / "elsewhere")))
    refused("the mountpoint of a mount cannot change")
    assert m.run("cat", "/etc/cachefs/set.toml").stdout == kept
    node.configure()
    package(node.packages, "3.0", depends="a-package-that-does-not-exist")
    refused("cannot install cachefs 3.0", "journalctl -u cachefs-install")
    package(node.packages, "1.0")
    # What needs a new mount waits for one.
    node.configure(("read-only = true", "read-only = false"))
    node.once()
    assert node.pid != pid and node.status()["read_only"] is True and node.read() == contents(node.source)


@pytest.mark.slow
def test_metrics_for_other_nodes(node: Node) -> None:
    """The service may open no network socket without the addition, whatever its file says."""
    port = free_port()
    commented = re.findall(r"^  # (.*)$", MANIFEST.read_text(), re.MULTILINE)
    addition = yaml.safe_load("\n".join(commented[commented.index("metrics.conf: |") :][:4]))["metrics.conf"]
    assert "IPAddressAllow=localhost 10.0.0.0/8" in addition
    (node.configuration / "metrics.conf").write_text(addition)
    node.configure(("# metrics", "metrics"), ("9123", str(port)))
    node.once()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"cachefs_read_hits" in answer.read()
    pid = node.pid
    drop_ins = "/etc/systemd/system/cachefs@.service.d"
    assert node.machine.run("ls", drop_ins).stdout == "pod-metrics.conf\n"
    (node.configuration / "metrics.conf").unlink()
    node.configure()
    node.once()
    assert node.machine.run("ls", drop_ins).stdout == "" and node.pid != pid
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
