"""Draws mutants, tests each in a copy of the repository, and says which survive."""

import argparse
import fnmatch
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachefs.contract import c_header
from tests.agreement import library
from tests.conftest import mount_lines
from tests.mutation import Mutant, c_mutants, python_mutants
from tests.mutation.targets import RUNS, TARGETS, Runs

Testing = Generator[tuple[Mutant, str], None, list[Mutant]]
REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 60
"""Of a test. One that alone and without a mutant takes longer is passed over."""
_SILENT_S = 100
"""When pytest cannot end what hangs, it is ended after this time without a word."""
_MODEL_RUNS, _AGREEMENT_EXAMPLES = 40, 200
_FASTPATH_TIMEOUT_S = 5
_FLAGS = ["-std=gnu11", "-O1", "-g", "-fPIC", "-D_GNU_SOURCE", "-pthread", "-w"]


def all_mutants(path: str) -> list[Mutant]:
    source = (REPOSITORY / path).read_bytes()
    language = python_mutants if path.endswith(".py") else c_mutants
    functions = list(language.functions(source))
    left_out = TARGETS[path]
    assert left_out <= {name for name, _, _ in functions}, f"{path}: {left_out}"
    without = [(start, end) for name, start, end in functions if name in left_out]
    return [
        each for each in language.mutants(path, source) if not any(start <= each.start < end for start, end in without)
    ]


def draw(seed: int, number: int, only: str) -> list[Mutant]:
    """As many in Python as in C, each site with the same chance."""
    draw = random.Random(seed)
    found: list[list[Mutant]] = [[], []]
    for path in TARGETS:
        if fnmatch.fnmatch(path, only):
            found[path.endswith(".py")] += all_mutants(path)
    for each in found:
        draw.shuffle(each)
    mixed = [each for pair in zip(*found, strict=False) for each in pair] if all(found) else found[0] + found[1]
    return mixed[:number]


def survivors_of(results: Path) -> Iterator[Mutant]:
    """Of an earlier run, perhaps at another commit: a line that has been changed since has none."""
    for line in results.read_text().splitlines():
        outcome = json.loads(line)
        if outcome["found_by"] is None:
            source = (REPOSITORY / outcome["path"]).read_bytes()
            yield from (
                each
                for each in all_mutants(outcome["path"])
                if all(outcome[key] == value for key, value in described(each, source).items())
            )


class Copy:
    """A copy of the repository in which mutants are tested."""

    def __init__(self, place: Path, seed: int) -> None:
        self._root = place / "cachefs"
        self._seed = str(seed)
        files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            (self._root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, self._root / name)
        self._temporary = place / "tmp"
        self._temporary.mkdir()
        self._log, self._selected = place / "log", place / "selected"
        self._objects = place / "objects"
        self._objects.mkdir()
        self._library = place / "fastpath.so"
        own = self._root / library.OWN_SOURCE.relative_to(REPOSITORY)
        self._c = self._root / library.SOURCES.relative_to(REPOSITORY)
        self._sources = [*sorted(self._c.glob("*/*.c")), own]
        c_header.write(self._c)
        self._mutated: set[str] = set()
        self._timeout_s = _TIMEOUT_S
        assert self._build(self._sources)

    def test(self, mutants: list[Mutant], runs: Runs) -> Iterator[tuple[Mutant, str | None]]:
        """Each of them that compiles, with the test that finds it; None for those that survive."""
        alive = [each for each in mutants if self._mutate([each])]
        for files, more in runs:
            if "--no-fastpath" in more and not any(each.path.endswith(".py") for each in alive):
                continue
            self._mutate([])
            alive = yield from self._tested(alive, self._collect(files, more), more)
        yield from ((each, None) for each in alive)

    def _tested(self, alive: list[Mutant], waiting: list[str], more: list[str]) -> Testing:
        """Those that are found, each with its test. Returns those that survive."""
        while alive and (failed := self._first_failure(alive, waiting, more)) is not None:
            waiting = waiting[waiting.index(failed) :]  # what ran before does not find the others either
            began = time.monotonic()
            sound = self._first_failure([], [failed], more) is None
            self._timeout_s = round(10 + 3 * (time.monotonic() - began))
            found = self._found_by(failed, alive, more) if sound else []
            self._timeout_s = _TIMEOUT_S
            yield from ((each, failed) for each in found)
            alive = [each for each in alive if each not in found]
            if sound and not found and len(alive) > 1:  # some together make it fail, and would hide what follows
                middle = len(alive) // 2
                first = yield from self._tested(alive[:middle], waiting, more)
                return first + (yield from self._tested(alive[middle:], waiting, more))
            if not found:
                print(f"fails now and then, or without a mutant: {failed}", flush=True)
                waiting = waiting[1:]
        return alive

    def _found_by(self, test: str, mutants: list[Mutant], more: list[str]) -> list[Mutant]:
        """One with which alone the test fails, as it does with all of these; none where it takes several."""
        while len(mutants) > 1:
            first, second = mutants[: len(mutants) // 2], mutants[len(mutants) // 2 :]
            mutants = second if self._first_failure(first, [test], more) is None else first
        return mutants if self._first_failure(mutants, [test], more) is not None else []

    def _mutate(self, mutants: list[Mutant]) -> bool:
        """Puts just these into the copy. False if it does not compile."""
        changed = {path: (REPOSITORY / path).read_bytes() for path in self._mutated}
        for each in sorted(mutants, key=lambda each: -each.start):  # the last one first: the others keep their places
            changed[each.path] = each.apply(changed.get(each.path) or (REPOSITORY / each.path).read_bytes())
        self._mutated = {each.path for each in mutants}
        stale: set[Path] = set()
        for name, source in changed.items():
            path = self._root / name
            path.write_bytes(source)
            if path.suffix == ".py":
                # What was compiled before may be as long and of the same second.
                for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                    compiled.unlink()
                try:
                    compile(source, path, "exec")
                except SyntaxError:
                    return False
            else:
                stale |= {path} if path.suffix == ".c" else set(self._sources)
        return self._build(sorted(stale))

    def _build(self, sources: list[Path]) -> bool:
        if not sources:
            return True
        for source in sources:
            if not _cc([*_FLAGS, f"-I{self._c}", "-c", source, "-o", self._object(source)]):
                return False
        sources = self._sources[:-1]
        program = self._c.with_name("cachefs-fastpath")
        program.unlink(missing_ok=True)
        self._library.unlink(missing_ok=True)
        answering = [self._object(source) for source in self._sources if source.name != "main.c"]
        return _cc(["-pthread", *map(self._object, sources), "-llmdb", "-o", program]) and _cc(
            [*library.LINK, *answering, "-llmdb", "-o", self._library]
        )

    def _object(self, source: Path) -> Path:
        return self._objects / f"{source.stem}.o"

    def _collect(self, files: list[str], more: list[str]) -> list[str]:
        self._pytest(["--collect-only", "-q", "-m", "not slow and not alone", *files, *more])
        return [line for line in self._log.read_text().splitlines() if "::" in line]

    def _first_failure(self, mutants: list[Mutant], tests: list[str], more: list[str]) -> str | None:
        """Of these tests, in this order, the first that fails or hangs with all these mutants at once."""
        assert self._mutate(mutants)
        self._selected.write_text("\n".join(tests))
        if not tests or self._pytest(["-x", "-v", "--timeout", str(self._timeout_s), *more, f"@{self._selected}"]):
            return None
        said = self._log.read_text(errors="replace")
        begun = [test for test in tests if f"\n{test} " in said]
        return begun[-1] if begun else tests[0]  # none has begun where a module cannot be imported

    def _pytest(self, arguments: list[str]) -> bool:
        """Whether all pass. What it says is in the log."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._root),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DEBUG_TEMPROOT": str(self._temporary),
            "MODEL_RUNS": str(_MODEL_RUNS),
            "AGREEMENT_EXAMPLES": str(_AGREEMENT_EXAMPLES),
            "AGREEMENT_LIBRARY": str(self._library),
            "FASTPATH_TIMEOUT_S": str(_FASTPATH_TIMEOUT_S),
        }
        # Who of a batch makes a test fail is found where each run draws the same.
        seeds = ["--seed", self._seed, "--hypothesis-seed", self._seed]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *seeds, *arguments]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            said = -1
            while process.poll() is None:
                try:
                    process.wait(_SILENT_S)
                except subprocess.TimeoutExpired:
                    if said == (said := self._log.stat().st_size):
                        process.kill()
        passed = process.returncode == 0
        if not passed:
            self._tidy_up()
        return passed

    def _tidy_up(self) -> None:
        """End what a failed test has left behind: processes of the copy, and mounts below its directory."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = f"PYTHONPATH={self._root}".encode() in (process / "environ").read_bytes().split(b"\0")
                if ours or (process / "exe").resolve().is_relative_to(self._root):
                    os.kill(int(process.name), signal.SIGKILL)
        for _ in range(3):
            for line in reversed(mount_lines()):
                fields = line.split(" ")
                if fields[4].startswith(str(self._temporary)):
                    if fields[fields.index("-") + 1].startswith("fuse"):
                        connection = Path("/sys/fs/fuse/connections") / fields[2].split(":")[1] / "abort"
                        if connection.exists():
                            connection.write_text("1")
                    subprocess.run(["umount", "-l", fields[4]], stderr=subprocess.DEVNULL, check=False)
        for left in self._temporary.iterdir():
            shutil.rmtree(left, ignore_errors=True)


def _cc(arguments: Sequence[str | Path]) -> bool:
    return not subprocess.run(["cc", *arguments], stderr=subprocess.DEVNULL, check=False).returncode


def batches(mutants: list[Mutant], size: int) -> list[list[Mutant]]:
    """Of one language each, so that both jobs have work. No two mutants of a batch overlap."""
    found: list[list[Mutant]] = []
    for each in mutants:
        for batch in found:
            same_language = batch[0].path.endswith(".py") == each.path.endswith(".py")
            overlaps = any(each.path == b.path and each.start < b.end and b.start < each.end for b in batch)
            if len(batch) < size and same_language and not overlaps:
                batch.append(each)
                break
        else:
            found.append([each])
    return found


def outcomes(mutants: list[Mutant], jobs: int, size: int, runs: Runs, seed: int) -> Iterator[tuple[Mutant, str | None]]:
    waiting = iter(batches(mutants, size))
    taking = threading.Lock()
    done: queue.SimpleQueue[tuple[Mutant, str | None] | None] = queue.SimpleQueue()

    def work(place: Path) -> None:
        try:
            copy = Copy(place, seed)
            while True:
                with taking:
                    batch = next(waiting, None)
                if batch is None:
                    return
                for outcome in copy.test(batch, runs):
                    done.put(outcome)
        finally:
            done.put(None)

    with tempfile.TemporaryDirectory(prefix="cachefs-mutants-") as place:
        Path(place).chmod(0o755)
        for job in range(jobs):
            threading.Thread(target=work, args=(Path(place) / str(job),), daemon=True).start()
        while jobs:
            if (outcome := done.get()) is None:
                jobs -= 1
            else:
                yield outcome


def record(mutant: Mutant, found_by: str | None) -> dict[str, Any]:
    source = (REPOSITORY / mutant.path).read_bytes()
    place = {"line": mutant.line(source), "start": mutant.start}
    return {**described(mutant, source), **place, "found_by": found_by}


def described(mutant: Mutant, source: bytes) -> dict[str, str]:
    """What stays the same when lines before it are changed."""
    return {
        "path": mutant.path, "operator": mutant.operator, "before": source[mutant.start : mutant.end].decode(),
        "after": mutant.replacement.decode(),
        "context": source.splitlines()[mutant.line(source) - 1].decode().strip(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--number", type=int, default=300, help="how many mutants")
    parser.add_argument("--only", default="*", help="modules that match this pattern")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--batch", type=int, default=25, help="mutants that are tested together")
    parser.add_argument("--quick", action="store_true", help="with the tests alone that need no mount")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only what survived in this results file")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="fail if fewer are found")
    parser.add_argument("--results", type=Path, default=Path("build/mutants.jsonl"))
    arguments = parser.parse_args()
    print(f"--seed {arguments.seed}", flush=True)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, int, str], dict[str, Any]] = {}
    if arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            outcome = json.loads(line)
            results[outcome["path"], outcome["start"], outcome["after"]] = outcome
    if arguments.again is not None:
        drawn = list(survivors_of(arguments.again))
    else:
        drawn = draw(arguments.seed, arguments.number, arguments.only)
    left = [each for each in drawn if (each.path, each.start, each.replacement.decode()) not in results]
    with arguments.results.open("a") as file:
        runs = RUNS[: 1 if arguments.quick else None]
        for mutant, found_by in outcomes(left, arguments.jobs, arguments.batch, runs, arguments.seed):
            outcome = record(mutant, found_by)
            results[outcome["path"], outcome["start"], outcome["after"]] = outcome
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            print(f"{found_by or 'SURVIVES'}  {describe(outcome)}", flush=True)
    survivors = [each for each in results.values() if each["found_by"] is None]
    print(f"\n{len(results)} mutants, {len(survivors)} survive")
    for file_, count in Counter((each["found_by"] or "").split("::")[0] for each in results.values()).most_common():
        print(f"{count:5} {file_ or 'survive'}")
    for each in survivors:
        print(f"survives: {describe(each)}")
    return int(len(results) - len(survivors) < arguments.at_least * len(results))


def describe(outcome: dict[str, Any]) -> str:
    before, after = (" ".join(outcome[key].split()) for key in ("before", "after"))
    place = f"{outcome['path']}:{outcome['line']}"
    return f"{place} {outcome['operator']}: {before} -> {after or 'nothing'} in: {outcome['context']}"


if __name__ == "__main__":
    sys.exit(main())
