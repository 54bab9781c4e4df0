"""Finds the daemon of a mount, and sends requests to it. `Client` is also for training scripts.

It needs only `cachefs.system` and `cachefs.errors` besides.
"""

from cachefs.client.client import Client

__all__ = ["Client"]
