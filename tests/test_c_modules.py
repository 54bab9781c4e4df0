"""The C of the fast path: modules that depend on each other one way, locks that are checked, assertions that fire.

Modules lie in groups (folders). A module is X.c with X.h, or a header alone. It depends on another one whose header it
includes, or of which it uses a function or variable: object files say exactly which, also where a declaration is
repeated instead of included.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.agreement.library import SOURCES
from tests.conftest import REPOSITORY

Graph = dict[str, set[str]]
_INCLUDE = re.compile(r'^#include "(.+)\.h"$', re.MULTILINE)


def modules(sources: Path, place: Path) -> Graph:
    """Each module, as `group/name`, with those that it depends on. Objects are put into `place`."""
    files = {file: f"{file.parent.name}/{file.stem}" for file in sorted(sources.glob("*/*.[ch]"))}
    compiled = [file for file in files if file.suffix == ".c"]
    assert len({file.stem for file in compiled}) == len(compiled), "objects of the same name"
    subprocess.run(["cc", "-std=gnu11", "-w", "-D_GNU_SOURCE", f"-I{sources}", "-c", *compiled], cwd=place, check=True)
    graph: Graph = {module: set() for module in files.values()}
    for file, module in files.items():
        included = set(_INCLUDE.findall(file.read_text()))
        assert included <= graph.keys(), f"{file}: {included - graph.keys()} is not in a group"
        graph[module] |= included
    defined = {symbol: files[file] for file in compiled for symbol in _symbols(place, file, "--defined-only")}
    for file in compiled:
        graph[files[file]] |= {defined[used] for used in _symbols(place, file, "--undefined-only") if used in defined}
    for module, others in graph.items():
        others.discard(module)
    return graph


def _symbols(place: Path, source: Path, which: str) -> list[str]:
    """The external ones."""
    command = ["nm", "--extern-only", "--format=just-symbols", which, place / f"{source.stem}.o"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def groups(graph: Mapping[str, set[str]]) -> Graph:
    found: Graph = {}
    for module, others in graph.items():
        group = module.split("/")[0]
        found.setdefault(group, set()).update({other.split("/")[0] for other in others} - {group})
    return found


def cycle(graph: Graph) -> list[str]:
    """One that there is, from a node back to itself; none: empty."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the sources that a test may change."""
    return shutil.copytree(SOURCES, tmp_path / "sources")


def test_modules_and_groups_depend_one_way(tmp_path: Path) -> None:
    graph = modules(SOURCES, tmp_path)
    assert {"common/shared", "hits/answer", "serve/main"} <= graph.keys()
    assert {"hits/reading", "hits/attributes"} <= graph["hits/answer"]
    assert not cycle(graph), "modules"
    assert not cycle(groups(graph)), "groups"


def test_an_include_that_closes_a_cycle_is_noticed(changed: Path, tmp_path: Path) -> None:
    with (changed / "misses" / "window.h").open("a") as file:
        file.write('#include "misses/miss.h"\n')
    assert {"misses/window", "misses/miss"} <= set(cycle(modules(changed, tmp_path)))


def test_a_call_that_closes_a_cycle_is_noticed(changed: Path, tmp_path: Path) -> None:
    with (changed / "relay" / "slots.c").open("a") as file:
        file.write("void relay_tick(struct relay *relay);\nvoid tick(struct relay *it) { relay_tick(it); }\n")
    assert {"relay/slots", "relay/relay"} <= set(cycle(modules(changed, tmp_path)))


def test_groups_that_depend_on_each_other_are_noticed_without_a_cycle_of_modules(changed: Path, tmp_path: Path) -> None:
    with (changed / "kernel" / "reply.c").open("a") as file:
        file.write('#include "relay/state.h"\n')
    graph = modules(changed, tmp_path)
    assert not cycle(graph)
    assert {"kernel", "relay"} <= set(cycle(groups(graph)))


def check_locks(sources: Path, file: str) -> subprocess.CompletedProcess[str]:
    command = [REPOSITORY / "scripts" / "check-locks", sources, file]
    return subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)


PLANTED = {
    "an access without the lock": (
        "relay/relay.c",
        "    lock_take(&relay_lock);\n    if (relay->python >= 0) {\n        relay->going = true;",
        "    if (relay->python >= 0) {\n        relay->going = true;\n        lock_take(&relay_lock);",
        "requires holding mutex 'relay_lock'",
    ),
    "a lock that is not released": (
        "appender/append.c",
        "    lock_release(&appender_lock);\n    return taken;",
        "    return taken;",
        "mutex 'appender_lock' is still held at the end of function",
    ),
    "a call without the lock": (
        "misses/miss.c",
        "    lock_take(&miss_lock);\n    decide_locked(worker, &miss);\n",
        "    decide_locked(worker, &miss);\n    lock_take(&miss_lock);\n",
        "calling function 'decide_locked' requires holding mutex 'miss_lock'",
    ),
    "a call that takes the lock twice": (
        "relay/lot.c",
        "    free_locked(relay, slot);\n    lock_release",
        "    relay_free_slot(relay, slot);\n    lock_release",
        "cannot call function 'relay_free_slot' while mutex 'relay_lock' is held",
    ),
    "the wrong order of two locks": (
        "relay/lot.c",
        "    free_locked(relay, slot);\n    lock_release",
        "    lock_take(&miss_lock);\n    lock_release(&miss_lock);\n    lock_release",
        "mutex 'miss_lock' must be acquired before 'relay_lock'",
    ),
    "a leader's field that any thread uses": (
        "hits/answer.c",
        "        assert_leader(worker);\n",
        "",
        "calling function 'speculative_read_lookup' requires holding mutex 'leader_lock'",
    ),
}


@pytest.mark.skipif(not shutil.which("clang"), reason="scripts/system-packages --locks installs clang")
@pytest.mark.parametrize("what", PLANTED)
def test_a_wrong_use_of_a_lock_is_noticed(changed: Path, what: str) -> None:
    name, right, wrong, message = PLANTED[what]
    text = (changed / name).read_text()
    assert text.count(right) == 1
    assert check_locks(changed, name).returncode == 0
    (changed / name).write_text(text.replace(right, wrong))
    done = check_locks(changed, name)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_assertion_that_fails_ends_the_process_and_says_where(tmp_path: Path) -> None:
    """A place is given back that was never taken."""
    (tmp_path / "main.c").write_text(
        '#include "common/shares.h"\n'
        "int main(void) { struct shares s; return shares_init(&s, 4, 0, 4) && (shares_give(&s, 7), 0); }\n"
    )
    files = [tmp_path / "main.c", SOURCES / "common" / "shares.c", "-o", tmp_path / "main"]
    subprocess.run(["cc", "-std=gnu11", "-O2", f"-I{SOURCES}", *files], check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert re.fullmatch(
        r"fast path: .*/common/shares\.c:[0-9]+: assertion failed: share && share->taken && shares->taken\n",
        done.stderr,
    )
