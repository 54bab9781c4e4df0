"""Order: what to read next. Samplers with which a job helps the cache, by a change of one line.

DataLoader(dataset, sampler=BundleRandom(len(dataset), rank=rank, world_size=world_size))
DataLoader(dataset, batch_sampler=LengthBucket(lengths, budget=16_384))
"""

from policies.order.bundle_random import BundleRandom
from policies.order.length_bucket import LengthBucket
from policies.order.window_shuffle import WindowShuffle

__all__ = ["BundleRandom", "LengthBucket", "WindowShuffle"]
