"""A training script that knows nothing of cachefs, on the source and on the mountpoint."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, settle

MakeMount = Callable[..., Mount]
IMAGES = 240


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, REPOSITORY / "examples" / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(said: str) -> list[str]:
    return re.findall(r"epoch \d+: loss \S+", said)


@pytest.mark.promise("TE-3")
@pytest.mark.slow
def test_the_same_losses_and_no_call_from_the_second_epoch_on(mount: MakeMount, tmp_path: Path) -> None:
    direct, source = tmp_path / "direct", tmp_path / "source"
    run("make_images.py", direct, "--images", IMAGES)
    shutil.copytree(direct, source)
    settle()
    on_source = run("train.py", direct, "--epochs", 3)
    m = mount(source, "--mutable", "checkpoints")
    first = run("train.py", m.path, "--epochs", 1)
    before = m.flush()
    assert before["cached_files"] == IMAGES and before["misses"] >= IMAGES
    rest = run("train.py", m.path, "--epochs", 3)  # goes on from its checkpoint
    assert rest.startswith("continuing after epoch 1\n")
    assert losses(first) + losses(rest) == losses(on_source) and len(losses(on_source)) == 3
    after = m.status()
    checkpoint = (source / "checkpoints/last.pt").stat().st_size
    assert after["cached_files"] == IMAGES
    # Read to go on from there, once; and not one image.
    assert after["source_bytes"] - before["source_bytes"] <= checkpoint + 4096
    print(f"on the source:\n{on_source}on the mountpoint:\n{first}{rest}")
