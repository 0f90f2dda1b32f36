"""Programs that are sent to a device and run by its Python: standard library only, one request each.

A module has `main(asked)`, which returns JSON values or writes to standard output itself. Data follows the program on
standard input. The device needs nothing of quantkit. This module is sent with every program: it prints the answer, one
JSON document after the mark, and opens locks.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from typing import Any


class LockError(Exception):
    """Another kind of file is in a lock's place: its path."""


def lock_file(path: Any, *, mode: int | None = None) -> Any:
    """Open a lock's file to read and append, without writing or waiting.

    Args:
        mode: permissions of a new file, regardless of the umask.

    Raises:
        LockError: it is a link, not a regular file, has several names, or cannot be opened.
        FileNotFoundError, PermissionError: it cannot be created.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = None
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        if mode is not None:
            os.fchmod(descriptor, mode)
    try:
        # O_CREAT may be refused for another user's file in a shared folder
        descriptor = os.open(path, flags) if descriptor is None else descriptor
    except OSError:
        raise LockError(str(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise LockError(str(path))
    return os.fdopen(descriptor, "a+")


def answer(main: Callable[[dict[str, Any]], Any], asked: dict[str, Any]) -> None:
    """Print the answer of `main`, or its error."""
    print(asked["mark"], flush=True)
    try:
        reply = main(asked)
    except LockError as problem:
        reply = {"error": "lock", "value": str(problem)[:200]}
    except PermissionError as problem:
        reply = {"error": "denied", "value": str(problem.filename)[:200]}
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        reply = {"error": "no-space" if full else "failed", "value": str(problem)[:200]}
    except Exception as problem:
        reply = {"error": "failed", "value": repr(problem)[:200]}
    if reply is not None:
        print(json.dumps(reply), flush=True)
