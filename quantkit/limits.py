"""How much a file from outside may make this process read, hold or compute.

A small file can unpack to gigabytes, and what is no file (a pipe, `/dev/zero`) never ends. Each limit has a name, is
far above what honest files need, and is raised by an environment variable: `QUANTKIT_LIMIT_PIXELS=1e9`.
"""

from __future__ import annotations

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
    """The most of one thing.

    Args:
        name: of the variable, lower case.
        default: the most, where nobody says otherwise.
        unit: of it, in a sentence.
        rule: what it limits.
    """

    name: str
    default: float
    unit: str
    rule: str

    @property
    def most(self) -> float:
        """The most there may be. Raises InputError `limit-invalid`."""
        text = os.environ.get(self._variable)
        if text is None:
            return self.default
        try:
            return float(text)
        except ValueError:
            raise InputError("limit-invalid", where=self._variable, value=text, rule="a number") from None

    def demand(self, found: float, where: str) -> None:
        """Refuse what is more. Raises InputError `over-limit`."""
        if found > self.most:
            raise self.exceeded(where, found)

    def exceeded(self, where: str, found: float = math.inf) -> InputError:
        """The error `over-limit`."""
        return InputError(
            "over-limit",
            where=where,
            value=f"{_short(found)} {self.unit}",
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


def read(path: Path, limit: Limit = DOCUMENT) -> bytes:
    """The bytes of a regular file.

    Raises:
        InputError: `over-limit`; `not-a-file` for a pipe, a device or a folder.
        OSError: as the system says.
    """
    # a pipe that nobody writes to would be waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, os.strerror(21), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                "not-a-file",
                where=str(path),
                value="a pipe, a socket or a device",
                rule="a file has an end",
                remedy="write its content into a file",
            )
        limit.demand(status.st_size, str(path))
        return stream.read(status.st_size)  # as much as there is: a buffer is made for as much as is asked for


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Runs a stranger's program (a chat template) in the body with the limits `SECONDS` and `MEMORY`.

    The time is watched where a signal can be: in the main thread. The memory is a limit of the whole process, for as
    long as the body runs.

    Raises:
        InputError: `over-limit`.
    """
    timed = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    allowed = held + int(MEMORY.most)
    if timed:
        signal.signal(signal.SIGALRM, _late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS.most)
    if soft == resource.RLIM_INFINITY or allowed < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    try:
        yield
    except _LateError:
        raise SECONDS.exceeded(where) from None
    except (MemoryError, OverflowError):
        raise MEMORY.exceeded(where) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


class _LateError(BaseException):
    """No `Exception`: a library that catches those must not swallow it."""


def _late(*_: object) -> None:
    raise _LateError


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e15 else f"{number:.1e}" if number < 1e300 else "too many"
