"""torch's DataLoader on a directory of images: processes that are forked and spawned, and several ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, settle
from tests.libraries import image_folder
from tests.libraries.epochs import check_two_epochs

MakeMount = Callable[..., Mount]
IMAGES = 120
WAYS = {
    "in the process": [],
    "fork": ["--workers", "2"],
    "spawn": ["--workers", "2", "--start", "spawn"],
    "persistent workers": ["--workers", "2", "--persistent"],
    "two ranks": ["--ranks", "2", "--workers", "1"],
}
CASES = [pytest.param(["--read-only"], way, id=way) for way in WAYS] + [pytest.param([], "fork", id="read-write")]


def train(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "tests.libraries.image_folder", str(root), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{IMAGES} images") == image_folder.EPOCHS
    return done.stdout


@pytest.mark.promise("TE-3")
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "way"), CASES)
def test_the_same_images_and_a_second_epoch_without_the_source(
    mount: MakeMount, tmp_path: Path, mode: list[str], way: str
) -> None:
    source = tmp_path / "source"
    image_folder.make(source, IMAGES)
    settle()
    expected = train(source, *WAYS[way])
    m = mount(source, *mode)
    cached = check_two_epochs(m, lambda root: train(root, *WAYS[way]), expected, read_only=bool(mode))
    assert cached == IMAGES
