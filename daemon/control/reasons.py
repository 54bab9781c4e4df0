"""Why a file or directory is in its state: one sentence for `cachefs info`."""

import os
from typing import Any

from cachefs.options import CacheLevel, Options
from cachefs.system.clock import NANOSECONDS


def reason(info: dict[str, Any], options: Options) -> str:
    """`info`: as in docs/CONTROL.md."""
    state, is_file = info["state"], info["type"] == "file"
    if state == "written":
        why = (
            "it was written through this mount, is open for writing, or was unpinned, so it stays writable and uncached"
        )
        return why if options.cache is CacheLevel.NONE else f"{why}; `cachefs pin` makes it immutable"
    if state == "mutable":
        if options.mutable_names.matches(os.path.basename(os.fsencode(info["path"]))):
            return (
                "its name is one of the default names of mutable files (--no-mutable-defaults), so it is never cached"
            )
        if options.immutable:
            return "--immutable does not match its path, or --mutable matches one of its names, so it is never cached"
        return "--mutable matches its path or another name of it, so it is never cached"
    if state == "immutable":
        return _of_immutable(info, options)
    if state == "pinned":
        if options.pins_everything:
            return "it was looked up or listed, and its metadata are kept"
        return "it is on the path to a pinned file, so its entry and attributes are kept"
    if options.cache is CacheLevel.NONE:
        return "this mount keeps nothing (--cache none)"
    if options.metadata_limit is not None:
        return "nothing has pinned it yet, or --metadata-limit leaves no room for it"
    if options.pins_everything:
        return f"it changed less than {options.settle_ns / NANOSECONDS:g} s ago, or was never looked up"
    if is_file:
        return "no job has opened it for reading since it was last changed, and no warm-up has pinned it"
    return "on this mount only files become immutable; names and attributes may change"


def _of_immutable(info: dict[str, Any], options: Options) -> str:
    why = "it was opened for reading, warmed up or pinned, so this mount keeps that version of it"
    if options.pins_everything:
        why = "the mount is read-only, so everything that was looked up is kept as it was"
    if options.cache is CacheLevel.METADATA:
        return f"{why}; --cache metadata keeps no data"
    if info["cached_bytes"] < info["size"]:
        return f"{why}; data that are not cached yet are fetched when they are read"
    return why
