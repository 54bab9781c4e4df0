"""Metrics for Prometheus, and the live status screen."""

import json
import re
import socket
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs.stats.latency import KINDS, bound_s, bucket
from daemon.control.exporter import MAX_CONNECTIONS, METRICS
from tests.conftest import CLI, REPOSITORY, Mount, cachefs, contents, free_port, wait_for
from tests.terminal import Terminal

MakeMount = Callable[..., Mount]


def scrape(address: Path | str) -> str:
    if isinstance(address, str):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            return str(answer.read().decode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(address))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    return body.decode()


@pytest.mark.parametrize("kind", ["socket", "port"])
def test_a_scrape(mount: MakeMount, source: Path, tmp_path: Path, kind: str) -> None:
    address: Path | str = tmp_path / "metrics.sock" if kind == "socket" else f"127.0.0.1:{free_port()}"
    m = mount(source, "--read-only", "--metrics", str(address).removeprefix("127.0.0.1:"))
    contents(m.path)
    status = m.flush()
    families = {family.name: family for family in text_string_to_metric_families(scrape(address))}
    assert all(family.documentation for family in families.values())
    values = {
        (sample.name, sample.labels.get("operation", "")): sample.value
        for family in families.values() for sample in family.samples
        if not sample.name.endswith("_bucket")
    }  # fmt: skip
    for described in METRICS:
        if described.key != "uptime_s" and not described.label:
            name = described.name + ("_total" if described.counter else "")
            assert values[name, ""] == status[described.key], name
    for name, count in status["source_ops"].items():
        assert values["cachefs_source_operations_total", name] == count
    assert all(s.labels["mountpoint"] == str(m.path) for f in families.values() for s in f.samples)
    latency = families["cachefs_request_duration_seconds"]
    misses = [s for s in latency.samples if s.labels["request"] == "read_miss"]
    counts = [s.value for s in misses if s.name.endswith("_bucket")]
    assert counts == sorted(counts) and counts[-1] == status["misses"] == 40
    # The dashboard and the alerts use only metrics that exist.
    used = set()
    for page in ("docs/grafana-dashboard.json", "docs/prometheus-alerts.yml"):
        text = (REPOSITORY / page).read_text()
        used |= set(re.findall(r"\bcachefs_[a-z_]+", text))
    told = {sample.name for family in families.values() for sample in family.samples} | set(families)
    assert used and used <= told, used - told
    json.loads((REPOSITORY / "docs/grafana-dashboard.json").read_text())


def test_what_is_no_scrape(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    address = tmp_path / "metrics.sock"
    m = mount(source, "--metrics", address)
    for request in (b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(address))
            connection.sendall(request)
            assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
    assert contents(m.path) == contents(source)
    place = tmp_path / "other"
    place.mkdir()
    bad_addresses = ("nine", "host:9000", "0.0.0:9000", "1.2.3.4:70000", "::1:9000", "[::g]:9000", ":9000", "1.2.3.4:")
    for bad, code in (*((bad, 2) for bad in bad_addresses), ("192.0.2.1:9000", 1), (str(tmp_path / "no/where"), 1)):
        done = cachefs("mount", source, place, "--cache-dir", tmp_path / "o", "--metrics", bad, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr
        assert "metrics" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_other_nodes_scrape_an_address(mount: MakeMount, source: Path, host: str) -> None:
    port = free_port()
    mount(source, "--metrics", f"{host}:{port}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: chooses the address that other nodes see
        ours = probe.getsockname()[0]
    assert not ours.startswith("127.")
    assert "cachefs_uptime_seconds" in scrape(f"{ours}:{port}")


def tcp_sockets(port: int, state: str) -> list[str]:
    """The local addresses of sockets on this port: "0A" listen, "01" are connected."""
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    fields = [line.split() for line in lines]
    return [each[1] for each in fields if each[3] == state and each[1].endswith(f":{port:04X}")]


def test_a_port_alone_is_closed_to_other_nodes(mount: MakeMount, source: Path) -> None:
    port = free_port()
    mount(source, "--metrics", str(port))
    assert "cachefs_uptime_seconds" in scrape(f"localhost:{port}")
    assert tcp_sockets(port, "0A") == [f"0100007F:{port:04X}"]


def test_connections_that_ask_nothing_are_limited(mount: MakeMount, source: Path) -> None:
    port = free_port()
    m = mount(source, "--metrics", str(port))
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(3 * MAX_CONNECTIONS):
            further = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(ConnectionError):
                assert further.recv(1) == b""  # closed at once
        assert len(tcp_sockets(port, "01")) == MAX_CONNECTIONS
        assert contents(m.path) == contents(source)
    wait_for(lambda: scrape_or_nothing(port), bool)


def scrape_or_nothing(port: int) -> str:
    with suppress(OSError):
        return scrape(f"127.0.0.1:{port}")
    return ""


def test_a_mountpoint_whose_name_is_no_text(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    """Regression: the first scrape failed, and none was answered after it."""
    address = tmp_path / "metrics.sock"
    m = mount(source, "--metrics", address, name="m\udcff\n")
    for _ in range(2):
        assert f'cachefs_uptime_seconds{{mountpoint="{tmp_path}/m\\\\xff\\\\x0a"}}' in scrape(address)
    assert "Traceback" not in m.log()


def test_buckets_are_told_apart() -> None:
    for ns in (1, 1023, 1024, 1279, 1280, 5_000, 10**6, 12_345_678, 10**9, 10**12):
        number = bucket(ns)
        assert number == 0 or bound_s(number - 1) <= ns / 1e9
        assert ns / 1e9 < bound_s(number) or number == 103


@pytest.mark.alone
def test_latencies_are_what_a_reader_sees(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only", "--simulate-latency", "20")
    contents(m.path)
    latencies = m.status()["latencies"]
    assert set(latencies) == set(KINDS)
    misses = latencies["read_miss"]
    assert misses["count"] == 40 and 0.035 < misses["p50_s"] < 0.2 and misses["p50_s"] <= misses["p99_s"]
    assert misses["sum_s"] > 40 * 0.04
    hits = latencies["read_hit"]
    m.drop_caches()
    m.flush()
    contents(m.path)
    now = m.status()["latencies"]["read_hit"]
    assert now["count"] >= hits["count"] + 40 and now["p50_s"] < 0.02
    assert m.status()["latencies"]["read_miss"]["count"] == 40


def test_the_live_screen(mount: MakeMount, source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    m = mount(source, "--read-only", "--simulate-latency", "2")
    terminal = Terminal(tmp_path, [*CLI, "status", m.path, "--watch", "--interval", "0.5"])
    request.addfinalizer(terminal.close)
    wait_for(terminal.screen, lambda screen: "since the start" in screen)
    contents(m.path)
    screen = wait_for(terminal.screen, lambda screen: "read miss" in screen)
    assert max(map(len, screen.splitlines())) <= 80
    for words in (
        "hit ratio",
        "from memory",
        "from SSD",
        "from source",
        "cache",
        "pinned",
        "p50",
        "p99",
        "source calls per second",
    ):
        assert words in screen, screen
    wait_for(terminal.screen, lambda screen: "idle" in screen)
    terminal.press("C-c")
    wait_for(terminal.screen, lambda screen: "hit ratio" not in screen and "Traceback" not in screen)


def test_status_costs_little(mount: MakeMount, source: Path) -> None:
    """Counted, not timed: a status asks nothing of the source, and reads the index only once."""
    m = mount(source, "--read-only")
    contents(m.path)
    m.flush()
    before = m.status()
    for _ in range(50):
        m.status()
    after = m.status()
    for name in ("source_ops", "hits", "misses", "uncommitted", "pinned_inodes"):
        assert after[name] == before[name]
