"""How a mount reports its configuration, and which changes it applies while mounted."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Mount, cachefs, wait_for

MakeMount = Callable[..., Mount]


def test_every_value_and_where_it_comes_from(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "64M"\nprofile = "inference"\n')
    m = mount(source, "--config", file, "--fetch-threads", 3)
    shown = json.loads(cachefs("config", "show", m.path, "--json").stdout)
    assert shown["cache-size"] == {"value": "64M", "origin": f"{file}, line 1"}
    assert shown["fetch-threads"] == {"value": 3, "origin": "command line"}
    assert shown["revalidate"] == {"value": "never", "origin": "profile inference"}
    assert shown["attr-timeout"] == {"value": "inf", "origin": "default"}  # JSON has no infinity
    lines = cachefs("config", "show", m.path).stdout.splitlines()
    assert len(lines) == len(shown)
    assert any(line.split("#")[0].strip() == 'cache-size = "64M"' for line in lines)
    done = cachefs("config", "show", tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_sighup_reads_the_file_again(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "64M"\nlog-level = "info"\n')
    m = mount(source, "--config", file, "--read-only")
    file.write_text('cache-size = "10 bananas"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.log, lambda log: "line 1: cache-size: '10 bananas' is not a size" in log)
    assert m.status()["cache_size_bytes"] == 64 << 20
    file.write_text("")
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.log, lambda log: f"the configuration is unchanged: {file}: contains no options" in log)
    file.write_text('cache-size = "64M"\nsource-timeout = 0\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.log, lambda log: "line 2: source-timeout: must be more than 0" in log)
    for name, value in (("cache-dir", "5"), ("fetch-threads", "inf"), ("metadata-limit", "inf")):
        file.write_text(f'cache-size = "64M"\n{name} = {value}\n')
        os.kill(m.pid, signal.SIGHUP)
        wait_for(m.log, lambda log, name=name: f"line 2: {name}: " in log)
    assert m.status()["cache_size_bytes"] == 64 << 20 and "Traceback" not in m.log()
    file.write_text('cache-size = "1"\nlog-level = "warning"\nretention = "lru"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: status["cache_size_bytes"] == 1)
    wait_for(m.log, lambda log: "reloaded, except: retention (" in log)
    shown = json.loads(cachefs("config", "show", m.path, "--json").stdout)
    assert shown["log-level"] == {"value": "warning", "origin": f"{file}, line 2"}
    assert shown["retention"]["value"] == "no-replacement"
    assert (m.path / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()
    assert wait_for(m.status, lambda s: s["skipped_admissions"] > 0)["cached_files"] == 0


def test_a_file_that_does_not_answer_delays_nobody(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    """Regression: the daemon read it in the thread that answers requests, and the mount hung."""
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "64M"\n')
    m = mount(source, "--config", file)
    file.unlink()
    os.mkfifo(file)
    for _ in range(3):
        os.kill(m.pid, signal.SIGHUP)
        time.sleep(0.1)
        began_s = time.monotonic()
        (m.path / "new").write_bytes(b"written")
        assert m.status()["pid"] == m.pid and time.monotonic() - began_s < 5
    wait_for(m.log, lambda log: f"the configuration is unchanged: {file} does not answer" in log)
    file.unlink()
    file.write_text('cache-size = "32M"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: status["cache_size_bytes"] == 32 << 20)
