"""python-daemon also installs an import package named `daemon`. If both are installed, one has overwritten files of the
other. This check reports it before anything fails in an obscure way."""

import importlib.metadata

from cachefs.errors import CacheFsError


def check_daemon_package() -> None:
    """Raises CacheFsError if another distribution claims our `daemon` package."""
    owners = importlib.metadata.packages_distributions().get("daemon", [])
    others = sorted({owner for owner in owners if owner != "cachefs"})
    import daemon

    if others or getattr(daemon, "DISTRIBUTION", None) != "cachefs":
        names = ", ".join(others) or "another distribution"
        raise CacheFsError(
            f"the import package 'daemon' of cachefs is shared with {names}: "
            "install cachefs in a virtual environment of its own"
        )
