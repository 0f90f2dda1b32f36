"""Programs that are sent to a device and run there by its Python: of the standard library alone, one request each.

A module has `main(asked)`, which answers what JSON has, or itself writes to standard output. What comes after the
program on standard input is its data. Nothing of quantkit needs to be there. This module is sent behind every program:
how it answers, one JSON document behind the mark that says where its answer begins, and how it opens a lock.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from typing import Any


class LockError(Exception):
    """Something else stands at a lock's place: its path."""


def lock_file(path: Any, *, mode: int | None = None) -> Any:
    """Open the file of a lock to read and append; nothing is written, and nothing waited for.

    Args:
        mode: of one that is made just now, whatever the process's mask.

    Raises:
        LockError: there is a link, no regular file, one that another name leads to, or one that may not be opened.
        FileNotFoundError, PermissionError: it may not be made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = None
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        if mode is not None:
            os.fchmod(descriptor, mode)
    try:
        # in a folder of all users one may not ask to make what another one has made
        descriptor = os.open(path, flags) if descriptor is None else descriptor
    except OSError:
        raise LockError(str(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise LockError(str(path))
    return os.fdopen(descriptor, "a+")


def answer(main: Callable[[dict[str, Any]], Any], asked: dict[str, Any]) -> None:
    """Print what `main` answers, or what it met."""
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
