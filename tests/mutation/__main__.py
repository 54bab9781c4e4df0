"""Draws mutants, tests each in a copy of the repository, and says which survive."""

import argparse
import fnmatch
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.mutation import Mutant, c_mutants, python_mutants
from tests.mutation.targets import TARGETS, WIDE

REPOSITORY = Path(__file__).resolve().parents[2]
_LIMIT_S = 200
"""Of the tests of one file. Where they take longer, they hang."""
_MODEL_RUNS = 15
_FLAGS = ["-std=gnu11", "-O1", "-g", "-D_GNU_SOURCE", "-pthread"]


def all_mutants(path: str) -> list[Mutant]:
    source = (REPOSITORY / path).read_bytes()
    language = python_mutants if path.endswith(".py") else c_mutants
    functions = list(language.functions(source))
    left_out = TARGETS[path].left_out
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


class Copy:
    """A copy of the repository in which one mutant at a time is tested."""

    def __init__(self, place: Path) -> None:
        self._root = place / "cachefs"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, files.decode().split("\0")):
            (self._root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, self._root / name)
        self._temporary = place / "tmp"
        self._temporary.mkdir()
        self._objects = place / "objects"
        self._objects.mkdir()
        self._sources = sorted((self._root / "cachefs/fastpath").glob("*.c"))
        assert self._build(self._sources)

    def test(self, mutant: Mutant, *, quick: bool) -> dict[str, Any] | None:
        """What became of it; None if it does not compile."""
        path = self._root / mutant.path
        source = path.read_bytes()
        changed = mutant.apply(source)
        at = mutant.line(source)
        said = {
            "path": mutant.path, "line": at, "operator": mutant.operator, "start": mutant.start,
            "before": source[mutant.start : mutant.end].decode(), "after": mutant.replacement.decode(),
            "context": source.splitlines()[at - 1].decode().strip(),
        }  # fmt: skip
        began = time.monotonic()
        while True:
            try:
                path.write_bytes(changed)
                if not self._compiles(path, changed):
                    return None
                found_by = self._run_tests(mutant.path, quick=quick)
            finally:
                path.write_bytes(source)
                self._compiles(path, source)
            if found_by is None or "::" not in found_by or not self._pytest([found_by]):
                return {**said, "found_by": found_by, "quick": quick, "seconds": round(time.monotonic() - began, 1)}
            print(f"fails without a mutant: {found_by}", flush=True)

    def _compiles(self, path: Path, source: bytes) -> bool:
        if path.suffix == ".py":
            # What was compiled before may be as long and of the same second.
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()
            try:
                compile(source, path, "exec")
            except SyntaxError:
                return False
            return True
        return self._build([path] if path.suffix == ".c" else self._sources)

    def _build(self, sources: list[Path]) -> bool:
        for source in sources:
            command: list[str | Path] = ["cc", *_FLAGS, "-w", "-c", source, "-o", self._objects / f"{source.stem}.o"]
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
                return False
        objects = [self._objects / f"{source.stem}.o" for source in self._sources]
        program = self._root / "cachefs/fastpath/cachefs-fastpath"
        program.unlink(missing_ok=True)
        command = ["cc", "-pthread", *objects, "-llmdb", "-o", program]
        return not subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode

    def _run_tests(self, path: str, *, quick: bool) -> str | None:
        """The test that fails; None if all pass."""
        if found := self._pytest([*TARGETS[path].quick, "-m", "not slow"]):
            return found
        modes: list[list[str]] = [] if quick else [[], ["--no-fastpath"]] if path.endswith(".py") else [[]]
        for more in modes:
            if found := self._pytest([*WIDE, "-m", "not slow and not alone", *more]):
                return found
        return None

    def _pytest(self, arguments: list[str]) -> str | None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._root),
            "PYTEST_DEBUG_TEMPROOT": str(self._temporary),
            "MODEL_RUNS": str(_MODEL_RUNS),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=_LIMIT_S * sum(".py" in each for each in arguments))
        except subprocess.TimeoutExpired:
            self._tidy_up()
            process.communicate()
            return f"{arguments[0]} (hangs)"
        if process.returncode in (0, 5):  # 5: no test is selected
            return None
        self._tidy_up()
        named = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return named[0].split(" ", 1)[1] if named else f"{arguments[0]} (ends with {process.returncode})"

    def _tidy_up(self) -> None:
        """End what a failed test has left behind: processes of the copy, and mounts below its directory."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = f"PYTHONPATH={self._root}".encode() in (process / "environ").read_bytes().split(b"\0")
                if ours or (process / "exe").resolve().is_relative_to(self._root):
                    os.kill(int(process.name), signal.SIGKILL)
        for _ in range(3):
            for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
                fields = line.split(" ")
                if fields[4].startswith(str(self._temporary)):
                    if fields[fields.index("-") + 1].startswith("fuse"):
                        connection = Path("/sys/fs/fuse/connections") / fields[2].split(":")[1] / "abort"
                        if connection.exists():
                            connection.write_text("1")
                    subprocess.run(["umount", "-l", fields[4]], stderr=subprocess.DEVNULL, check=False)
        for left in self._temporary.iterdir():
            shutil.rmtree(left, ignore_errors=True)


def outcomes(
    mutants: list[Mutant], known: set[tuple[str, int, str]], jobs: int, *, quick: bool
) -> Iterator[dict[str, Any]]:
    waiting = iter([each for each in mutants if (each.path, each.start, each.replacement.decode()) not in known])
    ready = threading.Condition()
    done: list[dict[str, Any]] = []
    running = jobs

    def work(place: Path) -> None:
        nonlocal running
        try:
            copy = Copy(place)
            while True:
                with ready:
                    mutant = next(waiting, None)
                if mutant is None:
                    return
                if (outcome := copy.test(mutant, quick=quick)) is not None:
                    with ready:
                        done.append(outcome)
                        ready.notify()
        finally:
            with ready:
                running -= 1
                ready.notify()

    with tempfile.TemporaryDirectory(prefix="cachefs-mutants-") as place:
        Path(place).chmod(0o755)
        threads = [threading.Thread(target=work, args=(Path(place) / str(job),)) for job in range(jobs)]
        for thread in threads:
            thread.start()
        while True:
            with ready:
                while not done and running:
                    ready.wait()
                if not done:
                    break
                outcome = done.pop(0)
            yield outcome
        for thread in threads:
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--number", type=int, default=300, help="how many mutants")
    parser.add_argument("--only", default="*", help="modules that match this pattern")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--quick", action="store_true", help="leave out the wider selection of tests")
    parser.add_argument("--results", type=Path, default=Path("build/mutants.jsonl"))
    arguments = parser.parse_args()
    print(f"--seed {arguments.seed}", flush=True)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, int, str], dict[str, Any]] = {}
    if arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            outcome = json.loads(line)
            results[outcome["path"], outcome["start"], outcome["after"]] = outcome
    known = {key for key, each in results.items() if each["found_by"] or arguments.quick or not each["quick"]}
    drawn = draw(arguments.seed, arguments.number, arguments.only)
    with arguments.results.open("a") as file:
        for outcome in outcomes(drawn, known, arguments.jobs, quick=arguments.quick):
            results[outcome["path"], outcome["start"], outcome["after"]] = outcome
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            print(f"{outcome['found_by'] or 'SURVIVES'}  {describe(outcome)}  {outcome['seconds']} s", flush=True)
    survivors = [each for each in results.values() if each["found_by"] is None]
    print(f"\n{len(results)} mutants, {len(survivors)} survive")
    for file_, count in Counter((each["found_by"] or "").split("::")[0] for each in results.values()).most_common():
        print(f"{count:5} {file_ or 'survive'}")
    for each in survivors:
        print(f"survives: {describe(each)}")
    return 0


def describe(outcome: dict[str, Any]) -> str:
    before, after = (" ".join(outcome[key].split()) for key in ("before", "after"))
    place = f"{outcome['path']}:{outcome['line']}"
    return f"{place} {outcome['operator']}: {before} -> {after or 'nothing'} in: {outcome['context']}"


if __name__ == "__main__":
    sys.exit(main())
