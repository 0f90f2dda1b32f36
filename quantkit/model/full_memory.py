"""What a machine without free memory makes Python and other libraries raise, as one error that says so."""

from __future__ import annotations

import errno
import re

from quantkit.errors import InputError

# torch's allocator of the CPU raises a plain RuntimeError; libraries written in Rust and C pass on the system's words
_SAID = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|\(os error 12\)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one it was raised from, means that there was no more memory."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | OSError) and _SAID.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(where: str, error: BaseException) -> InputError:
    """The error for it: `out-of-memory`."""
    said = " ".join(str(error).split())[:160] or "there is no more memory"
    return InputError("out-of-memory", where=where, value=said, remedy="a larger machine, or less beside it here")
