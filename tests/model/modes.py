"""The kinds of mounts that are compared with the reference."""

import math

from cachefs.options import CacheLevel, Options, Revalidate
from policies.globs import Globs

SMALL = 64 << 10
"""Bytes of what is fetched as a whole: the larger files of the machine are fetched in ranges."""


def _options(**more: object) -> Options:
    return Options(cache_size_bytes=1 << 30, small_file_bytes=SMALL, fastpath=False, **more)  # type: ignore[arg-type]


OPTIONS = {
    "read-write": _options(),
    "read-only": _options(read_only=True, attr_timeout_s=math.inf),
    "mutable": _options(mutable=Globs(("**",))),
    "none": _options(cache=CacheLevel.NONE),
    "metadata": _options(cache=CacheLevel.METADATA),
    "limited": _options(metadata_limit=3, metadata_retention="lru"),
    "never": _options(read_only=True, attr_timeout_s=math.inf, revalidate=Revalidate.NEVER),
    "limited-never": _options(
        read_only=True,
        attr_timeout_s=math.inf,
        revalidate=Revalidate.NEVER,
        metadata_limit=3,
        metadata_retention="lru",
        mutable=Globs(("d/*",)),
    ),
    "full-never": _options(
        read_only=True, attr_timeout_s=math.inf, revalidate=Revalidate.NEVER, metadata_limit=3, mutable=Globs(("e/*",))
    ),
}
