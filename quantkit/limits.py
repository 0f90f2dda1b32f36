"""Limits on how much a file from outside may make this process read, hold or compute.

A small file can unpack to gigabytes, and a pipe or `/dev/zero` never ends. Every limit has a name, is far above what
honest files need, and can be raised by an environment variable: `QUANTKIT_LIMIT_PIXELS=1e9`.
"""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError


@dataclass(frozen=True)
class Limit:
    """Upper limit of one quantity: `name` names its variable, `unit` and `rule` describe it in errors."""

    name: str
    default: float
    unit: str
    rule: str

    @property
    def most(self) -> float:
        """Largest amount allowed. Raises InputError `limit-invalid`."""
        text = os.environ.get(self._variable)
        if text is None:
            return self.default
        try:
            most = float(text)
        except ValueError:
            most = math.nan
        if not most > 0:
            raise InputError("limit-invalid", where=self._variable, value=text, rule="a number above 0, or inf")
        return most

    def demand(self, amount: float, where: str) -> None:
        """Refuse an amount above the limit. Raises InputError `over-limit`."""
        if amount > self.most:
            raise self.exceeded(where, amount)

    def exceeded(self, where: str, amount: float = math.inf) -> InputError:
        """Make the error `over-limit`."""
        return InputError(
            "over-limit",
            where=where,
            value=f"{_short(amount)} {self.unit}",
            rule=f"{self.rule}: at most {_short(self.most)}",
            remedy=f"{self._variable}=… raises it, for a file that you trust",
        )

    @property
    def _variable(self) -> str:
        return f"QUANTKIT_LIMIT_{self.name.upper()}"


DOCUMENT = Limit("document", 64 << 20, "bytes", "a document (YAML, JSON, a header) is read whole")
DATA = Limit("data", 4 << 30, "bytes", "a file of data is read whole")
UNPACKED = Limit("unpacked", 8 << 30, "bytes", "what an archive or a table unpacks to is held in memory")
PIXELS = Limit("pixels", 1 << 28, "pixels", "an image is decoded and resized whole")
VALUES = Limit("values", 1e6, "values", "a YAML document, aliases counted each time")
LAYERS = Limit("layers", 10_000, "layers", "a model is made layer by layer")
SECONDS = Limit("seconds", 60, "seconds", "a chat template or a query is waited for")
MEMORY = Limit("memory", 2 << 30, "bytes", "a chat template writes a text")


# bytes to read from a file whose size is reported as 0
_UNKNOWN = 1 << 24
# seconds between repeated signals after the time limit
_AGAIN = 1.0


def read(path: Path, limit: Limit = DOCUMENT) -> bytes:
    """Read the bytes of a regular file.

    Raises:
        InputError: `over-limit`; `not-a-file` for a pipe, a device or a folder.
        OSError: as the system reports it.
    """
    # without O_NONBLOCK, opening a pipe without a writer would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, os.strerror(21), str(path))
        if not stat.S_ISREG(status.st_mode):
            rule, remedy = "a file has an end", "write its content into a file"
            raise InputError("not-a-file", str(path), "a pipe, a socket or a device", rule, remedy)
        limit.demand(status.st_size, str(path))
        # read the known size, since Python allocates a buffer of the requested size. Files of /proc have size 0
        content = stream.read(status.st_size) if status.st_size else stream.read(_UNKNOWN)
        limit.demand(len(content), str(path))
        return content


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Run a stranger's program (a chat template) in the body with the limits `SECONDS` and `MEMORY`.

    The time limit works by a signal, in the main thread, between two bytecodes of Python. If the body does not return
    within a further minute, the process ends. The memory limit holds for the whole process while the body runs, where
    `/proc` shows the current use. In other threads, and inside another `guarded`, neither is set.

    Raises:
        InputError: `over-limit`.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    seconds, limit = SECONDS.most, resource.getrlimit(resource.RLIMIT_DATA)
    try:
        if math.isfinite(seconds):
            signal.signal(signal.SIGALRM, _late)
            # again every second: Python drops an exception raised in a finalizer or a callback of the garbage collector
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            faulthandler.dump_traceback_later(seconds + 60, exit=True, file=2)  # sys.stderr may have no descriptor
        allowed = _held() + MEMORY.most
        if allowed < (math.inf if limit[0] == resource.RLIM_INFINITY else limit[0]):
            resource.setrlimit(resource.RLIMIT_DATA, (int(allowed), limit[1]))
        yield
    except _LateError:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise SECONDS.exceeded(where) from None
    except (MemoryError, OverflowError):
        raise MEMORY.exceeded(where) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, limit)


def _held() -> float:
    """Return the bytes of data that this process holds; infinite if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except (OSError, ValueError, IndexError):
        return math.inf
    return float(pages * resource.getpagesize())


class _LateError(BaseException):
    """Error for an exceeded time limit; not an `Exception`, so that no library swallows it."""


def _late(*_: object) -> None:
    raise _LateError


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e15 else f"{number:.1e}" if number < 1e300 else "too many"
