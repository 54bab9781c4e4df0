"""`python -m daemon` is `cachefs`."""

import sys

_INTERRUPTED = 130
"""As in output.py, which is not loaded yet."""


def main() -> None:
    try:
        from daemon.cli.main import main as command  # takes a moment, in which Ctrl-C may come
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    command(prog_name="cachefs")


if __name__ == "__main__":
    main()
