"""Train a small network on images: DATA/train/CLASS/*.jpg. An ordinary script that knows nothing of cachefs.

    python examples/train.py /data/shapes --epochs 3

It writes a checkpoint beside the data after each epoch, and continues from it when it is started again.
"""

import argparse
import os
import random
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ImageFolder(Dataset):
    """Images and the number of their class, the directories' names in order."""

    def __init__(self, root: Path, pixels: int) -> None:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (path, label) for label, name in enumerate(classes) for path in sorted((root / name).glob("*.jpg"))
        ]
        self.classes = len(classes)
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB").resize((self.pixels, self.pixels))
        flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return flat.view(self.pixels, self.pixels, 3).permute(2, 0, 1).float() / 255 - 0.5, label


def make_network(classes: int, pixels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * (pixels // 8) ** 2, classes),
    )  # fmt: skip


def save(path: Path, state: dict) -> None:
    """Atomically: a job that is killed leaves the last checkpoint whole."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="[DATA/checkpoints/last.pt]")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or arguments.data / "checkpoints" / "last.pt"

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    dataset = ImageFolder(arguments.data / "train", arguments.pixels)
    network = make_network(dataset.classes, arguments.pixels)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
        print(f"continuing after epoch {first}", flush=True)

    for epoch in range(first, arguments.epochs):
        order = list(range(len(dataset)))
        random.Random(arguments.seed * 1000 + epoch).shuffle(order)
        loader = DataLoader(dataset, arguments.batch_size, sampler=order, num_workers=arguments.workers)
        started = time.perf_counter()
        total = 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        rate = len(dataset) / (time.perf_counter() - started)
        print(f"epoch {epoch + 1}: loss {total / len(dataset):.6f}, {rate:,.0f} images/s", flush=True)
        save(
            checkpoint,
            {"epoch": epoch + 1, "network": network.state_dict(), "optimizer": optimizer.state_dict()},
        )


if __name__ == "__main__":
    main()
