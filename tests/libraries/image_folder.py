"""Training on a directory of images, one subdirectory for each class, as torchvision's ImageFolder reads it.

    python -m tests.libraries.image_folder DIRECTORY [--workers N] [--start METHOD] [--persistent] [--ranks N]

prints the digest of each of two epochs: of all images and labels that all ranks have read.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, root: Path) -> None:
        classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.samples = [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return torch.from_numpy(np.array(Image.open(file).convert("RGB"))), label


def make(root: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(count):
        place = root / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place / f"{number:04}.png")


def train(rank: int, arguments: argparse.Namespace, store: str) -> None:
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=arguments.ranks)
    images = ImageFolder(arguments.root)
    sampler = DistributedSampler(images, arguments.ranks, rank, drop_last=False)
    workers = arguments.workers
    loader = DataLoader(
        images,
        batch_size=8,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context=arguments.start if workers else None,
        persistent_workers=arguments.persistent,
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        found = [
            hashlib.sha256(image.numpy().tobytes() + bytes([label])).digest()
            for batch in loader
            for image, label in zip(*batch, strict=True)
        ]
        # The sum does not depend on the order.
        total = torch.tensor([sum(int.from_bytes(each[:6], "big") for each in found), len(found)], dtype=torch.int64)
        distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total[1].item()} images, {total[0].item():x}", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start", default="fork")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        store = f"{place}/store"
        if arguments.ranks == 1:
            train(0, arguments, store)
        else:
            torch.multiprocessing.spawn(train, (arguments, store), arguments.ranks)


if __name__ == "__main__":
    main()
