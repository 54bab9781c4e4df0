"""Coming to a mount whose daemon has ended.

What a mount is made of is held by its fast path, which hands it over when it is asked, and by the descriptor store of
a service manager. A fast path that does not answer, because it was stopped, is never left beside a new one: it would
serve the same requests from the same memory. If there is no descriptor store, what it holds is taken from it; it is
ended when another is started (`FastPath.run`).
"""

from cachefs.client import is_served
from cachefs.errors import CacheFsError
from cachefs.fastpath import launcher
from cachefs.fastpath.launcher import Inheritance
from cachefs.fastpath.shared import OtherVersion
from cachefs.mount_table import top_mount
from daemon import descriptor_store
from daemon.config import MountConfig
from daemon.instance import FASTPATH_SOCKET, MountInstance


def memory_name_of(instance: MountInstance) -> str:
    """What the memory is called that its processes share."""
    return f"cachefs-{instance.directory.name}"


def take_over(mount_config: MountConfig, instance: MountInstance) -> Inheritance | None:
    """What the mount is made of. The mountpoint is claimed. None: it has a daemon, or has died altogether.

    Raises CacheFsError where it is alive, and not to be had.
    """
    place = instance.mountpoint
    if not mount_config.options.fastpath or is_served(place):
        return None
    try:
        held = _find(instance)
    except OtherVersion:
        raise CacheFsError(
            f"the fast path of {place} is of another version, which shares memory of another layout: "
            "umount it, and mount it again"
        ) from None
    if held is None or launcher.is_unmounted(held.device):
        return None
    top = top_mount(place)
    if top is None or top.device != instance.device:
        return None
    if top.source != mount_config.source:
        raise CacheFsError(f"{place} is in use: {top.source} is mounted there by a cachefs whose daemon has died")
    if not held.shared.was_set_up_for(mount_config.options):
        raise CacheFsError(f"{place} was mounted with other options: unmount it first")
    return held


def _find(instance: MountInstance) -> Inheritance | None:
    """Raises CacheFsError, OtherVersion."""
    name = memory_name_of(instance)
    held = descriptor_store.take()
    if held is not None and launcher.memory_name(f"/proc/self/fd/{held.shared.fd}") != name:
        held = None
    if held is not None and not launcher.running(name):
        return held  # the store has the listening socket, which takes connections and never answers
    answer = Inheritance.ask(instance.directory / FASTPATH_SOCKET)
    return answer or held or _taken_from(launcher.running(name), instance.mountpoint)


def _taken_from(silent: list[launcher.Running], place: str) -> Inheritance | None:
    for fastpath in silent:
        try:
            return fastpath.inherit()
        except OSError as error:
            raise CacheFsError(
                f"the fast path of {place} (pid {fastpath.pid}) does not answer, and what it holds cannot be had "
                f"({error.strerror}): kill -CONT {fastpath.pid}, or umount -l {place}"
            ) from None
    return None
