"""Processes that are killed in the midst of any operation on the files of a folder."""

import contextlib
import os
import signal
import sys
from pathlib import Path

__all__ = ["killed", "kills"]

_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}


class _Killer:
    """Counts the operations that change files of a folder, and kills its process at one of them."""

    def __init__(self, folder, at, torn):
        self.folder, self.left, self.torn = f"{folder}{os.sep}", at, torn

    def __call__(self, event, arguments):
        if event not in _OPERATIONS or not self._counts(event, arguments):
            return
        self.left -= 1
        if not self.left:
            if self.torn:  # it is there, or empty, and nothing has come of its content
                os.open(arguments[0], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)

    def _counts(self, event, arguments):
        if event == "open":
            return _writes(*arguments[1:]) and self._is_inside(arguments[0])
        return not self.torn and any(map(self._is_inside, arguments[:2]))

    def _is_inside(self, path):
        if not isinstance(path, (str, bytes, os.PathLike)):  # a number of a file
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(self.folder)


def _writes(mode, flags):
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def killed(work, folder, at, torn=False):
    """Do some work in a child of this process, which is killed at one of its operations on files.

    Args:
        work: a function without arguments.
        folder: whose files count.
        at: the number of the operation, from 1.
        torn: count only files that are opened to write, and kill it after one was opened.

    Returns:
        Whether it was killed before it had finished.
    """
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
            sys.addaudithook(_Killer(Path(folder).absolute(), at, torn))
            work()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the work failed: {status}"
    return status == signal.SIGKILL


def kills(work, folder, before=lambda: None, step=1):
    """Kill some work at each of its operations on files, whole and torn, until it is not reached.

    Args:
        work: a function without arguments.
        folder: whose files count.
        before: what prepares the folder, each time.
        step: look at every so many operations.

    Yields:
        The number of the operation, each time after the work has been killed there.
    """
    for torn in (False, True):
        at = 1
        while True:
            before()
            if not killed(work, folder, at, torn):
                break
            yield at
            at += step
