"""Train a small network on parquet files (make_parquet.py), on one rank or several.

    python examples/train_parquet.py /data/sequences --workers 2
    torchrun --nproc-per-node 2 examples/train_parquet.py /data/sequences --workers 2

It writes a checkpoint every few steps, and continues from it, within the epoch, when it is started again.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cachefs.loaders import ParquetDataset

CLASSES, NUMBERS = 4, 256


def save(path: Path, state: dict) -> None:
    """Atomically: a job that is killed leaves the last checkpoint whole."""
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int, default=20, help="steps [20]")
    parser.add_argument("--stop-after", type=int, help="end after this many steps, as if the job were preempted")
    parser.add_argument("--numbers", type=Path, help="write the numbers of the samples to FILE.RANK", metavar="FILE")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    network: nn.Module = nn.Sequential(nn.EmbeddingBag(NUMBERS, 16), nn.Linear(16, CLASSES))
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        network = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    dataset = ParquetDataset(arguments.data, batch_size=arguments.batch_size, columns=["number", "ids", "label"])
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=arguments.workers,
        multiprocessing_context=arguments.start_method if arguments.workers else None,
        persistent_workers=arguments.workers > 0,
    )
    first = 0
    if arguments.checkpoint and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        dataset.load_state_dict(state["dataset"])
        first = state["dataset"]["drawn"]
        print(f"continuing in epoch {dataset.epoch + 1} after step {first}", flush=True)

    taken = 0
    for epoch in range(dataset.epoch, arguments.epochs):
        dataset.set_epoch(epoch)
        total, samples = 0.0, 0
        for step, batch in enumerate(loader, start=first + 1):
            loss = nn.functional.cross_entropy(network(batch["ids"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch["label"])
            samples += len(batch["label"])
            taken += 1
            if arguments.numbers:
                with open(f"{arguments.numbers}.{rank}", "a") as file:
                    print(epoch, *batch["number"].tolist(), file=file)
            stop = taken == arguments.stop_after
            if arguments.checkpoint and rank == 0 and (stop or step % arguments.save_every == 0):
                state = {
                    "network": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "dataset": dataset.state_dict(drawn=step),  # the state of one rank serves all
                }
                save(arguments.checkpoint, state)
            if stop:
                print(f"stopped in epoch {epoch + 1} after step {step}", flush=True)
                return
        first = 0
        print(f"epoch {epoch + 1}: rank {rank} saw {samples} samples, loss {total / samples:.4f}", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
