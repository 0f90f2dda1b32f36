"""A call to the system fails, or the process ends at it: the n-th of a kind, for every n. Then work is done again.

    python -m faults.calls NAME FOLDER     from tests/; prints what was wrong, fault by fault, as JSON

In a process that has imported little, so that forking it is cheap.
"""

import errno
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from faults.work import WORK, Work
from quantkit.cli import frame

# what an audit hook hears of; writes to a file that is open are heard of as the fsync that follows them
CALLS = {
    "open": ("open",),
    "rename": ("os.rename",),
    "remove": ("os.remove", "os.rmdir", "shutil.rmtree"),
    "mkdir": ("os.mkdir",),
    "fsync": ("fsync",),
}
ERRORS = {
    "full": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "broken": errno.EIO,
    "read-only": errno.EROFS,
    "no-descriptors": errno.EMFILE,
}
# named faults: a kind of call, and what happens at it; `killed` is SIGKILL, `interrupted` Ctrl-C, `terminated` SIGTERM
FAULTS = [
    *((call, error) for call in CALLS for error in ERRORS if (call, error) != ("fsync", "no-descriptors")),
    *((call, ended) for call in CALLS for ended in ("killed", "interrupted", "terminated")),
    *((call, f"{error}-from-then-on") for call in CALLS for error in ("full", "read-only")),
]
KILLED, TOO_MANY = -signal.SIGKILL, 60


def failing(work: Work, folder: Path, call: str, fault: str, count: int) -> int | None:
    """Does the work in a child, in which the count-th call fails; its exit code, None where it had fewer calls."""
    child = os.fork()
    if child == 0:
        os._exit(_child(work, folder, call, fault, count))
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    return None if code == 99 else code


def _child(work: Work, folder: Path, call: str, fault: str, count: int) -> int:
    signal.signal(signal.SIGTERM, frame._interrupt)
    signal.signal(signal.SIGINT, frame._interrupt)
    warnings.simplefilter("ignore")
    calls, events, ours = 0, CALLS[call], str(folder)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        if event not in events:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if event != "fsync" and not _inside(arguments[0], ours):
            return
        calls += 1
        if calls == count or (calls > count and fault.endswith("-from-then-on")):
            _strike(fault)

    real = os.fsync

    def fsync(descriptor: int) -> None:
        heard("fsync", (descriptor,))
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(heard)
    try:
        work.act(folder)
    except BaseException as problem:
        error = frame._as_error(problem, "compile")
        return 98 if error.code == "internal-error" else error.exit
    return 99 if calls < count else 0


def _inside(path: Any, folder: str) -> bool:
    # a name below a directory descriptor has no folder: it is ours
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    name = os.fsdecode(path)
    return name.startswith(folder) or not Path(name).is_absolute()


def _strike(fault: str) -> None:
    error = ERRORS.get(fault.removesuffix("-from-then-on"))
    if error is not None:
        raise OSError(error, os.strerror(error))
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "interrupted": signal.SIGINT, "terminated": signal.SIGTERM}[fault])


def tried(work: Work, folder: Path, call: str, fault: str, wanted: Any) -> str:
    """What is wrong with a fault, at whichever call, where `folder/prepared` is as it was before; "" for nothing."""
    # every call fails once as a full disk and once by SIGKILL, and every fifth as something else
    every = 1 if fault in ("full", "killed") else 5
    for count in range(1, TOO_MANY, every):
        place = folder / f"{call}-{fault}-{count}"
        shutil.copytree(folder / "prepared", place)
        code = failing(work, place, call, fault, count)
        if code is None:
            return ""
        # finished in spite of it (what was to be removed stays), refused, stopped, killed: never a mistake of ours
        if code not in (0, 2, 75, KILLED):
            return f"call {count}: exit {code}"
        try:
            work.act(place)
            if work.left(place) != wanted:
                return f"call {count}: something else is left"
        except Exception as problem:
            return f"call {count}: {type(problem).__name__}: {problem}"
    return "too many calls"


def main(name: str, folder: str) -> None:
    """Every fault of one work."""
    os.fsync = os.fstat  # no wait for the disk
    warnings.simplefilter("ignore")
    work, place = WORK[name], Path(folder)
    (place / "prepared").mkdir()
    work.prepare(place / "prepared")
    undisturbed = shutil.copytree(place / "prepared", place / "undisturbed")
    work.act(undisturbed)
    wanted = work.left(undisturbed)
    found = {f"{call}-{fault}": tried(work, place, call, fault, wanted) for call, fault in FAULTS}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
