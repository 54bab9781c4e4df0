"""Copies what the distribution cachefs-ml-client consists of: what jobs import, and the modules that this imports.

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
    for name in ("cachefs.client", "cachefs.loaders", "policies.order"):
        finder.import_hook(name)
    files = [Path(module.__file__) for module in finder.modules.values() if module.__file__]
    for file in [*files, REPOSITORY / "cachefs/py.typed"]:
        target = stage / file.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(HERE / name, stage / name)


if __name__ == "__main__":
    main()
