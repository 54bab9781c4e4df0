"""What a user is told when a mount could not begin, or ended by itself."""

import errno
import os

from cachefs.errors import CacheFsError, IndexUnavailable
from daemon.session import reason


def test_one_error_out_of_nested_groups() -> None:
    told = CacheFsError("the disk is full")
    group = BaseExceptionGroup("", [KeyError("other"), ExceptionGroup("", [ExceptionGroup("", [told])])])
    assert reason(group) is told
    assert str(reason(ExceptionGroup("", [IndexUnavailable("cannot write")]))) == "cannot write"
    failed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blob")
    assert str(reason(ExceptionGroup("", [failed]))) == "No space left on device: /cache/blob"
    bug = KeyError("bug")
    assert reason(ExceptionGroup("", [ExceptionGroup("", [bug])])) is bug
