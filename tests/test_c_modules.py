"""The C of the fast path is modules in groups (folders) that depend on each other one way.

A module is X.c with X.h, or a header alone. It depends on another one whose header it includes, or of which it uses a
function or variable: object files say exactly which, also where a declaration is repeated instead of included.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.agreement.library import SOURCES

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
