"""Which process asked: a later one of the same machine sees whether it is still there.

Whether a connection broke or whoever had it was killed looks the same from a device, so there only a lease ends what
nobody listens to. Here a process that is gone is gone: the kernel's boot, the namespace of its numbers, its number and
when it began name it once and for all. Where the system tells no such thing (not Linux), nobody is ever gone.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def client() -> str:
    """This process: `BOOT:NAMESPACE:PID:BEGAN`; empty where the system does not tell."""
    try:
        return f"{_kernel()}:{os.getpid()}:{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(other: object) -> bool:
    """Whether a process was one of this machine and has ended; False where that is not certain.

    Args:
        other: what a device says that `client` had given; whatever it is, it names no file.
    """
    try:
        kernel, pid, began = str(other).rsplit(":", 2)
        if kernel != _kernel():
            return False
        try:
            return _began(int(pid)) != int(began)
        except (FileNotFoundError, ProcessLookupError):
            return True
    except (OSError, ValueError, IndexError):
        return False


def _kernel() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{(_PROC / 'self/ns/pid').stat().st_ino}"


def _began(pid: int) -> int:
    """When it did, in ticks since the start of the machine; the name of a program may have brackets and blanks."""
    return int((_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[19])
