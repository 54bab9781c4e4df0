"""Talking to the daemon of a mount, and finding it. `Client` is for training scripts, too.

Programs other than the daemon need this room, `cachefs.system` and `cachefs.errors` only.
"""

from cachefs.client.client import Client

__all__ = ["Client"]
