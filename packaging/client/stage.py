"""Copies what the distribution cachefs-ml-client consists of: cachefs.client, and the modules that it imports.

Usage: stage.py DIRECTORY
"""

import shutil
import sys
from modulefinder import ModuleFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def main() -> None:
    stage = Path(sys.argv[1])
    shutil.rmtree(stage, ignore_errors=True)
    finder = ModuleFinder(path=[str(REPOSITORY)])  # without the standard library
    finder.import_hook("cachefs.client")
    files = [Path(module.__file__) for module in finder.modules.values() if module.__file__]
    for file in [*files, REPOSITORY / "cachefs/py.typed"]:
        target = stage / file.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(HERE / name, stage / name)


if __name__ == "__main__":
    main()
