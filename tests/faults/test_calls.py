"""A call to the system fails, or the process ends at it: the n-th of a kind, for every n. Then work is done again."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.work import WORK, Work
from quantkit.bundle import Bundle
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


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What each work leaves that nothing disturbs."""
    found = {}
    for name, work in WORK.items():
        folder = tmp_path_factory.mktemp(name)
        work.prepare(folder)
        work.act(folder)
        found[name] = work.left(folder)
    yield found


@pytest.mark.parametrize(
    ("name", "call", "fault"),
    [
        pytest.param(name, call, fault, id=f"{name}-{call}-{fault}")
        for name, work in WORK.items()
        for call, fault in FAULTS
        if not work.faults or fault in work.faults
    ],
)
def test_work_that_failed_is_done_again(
    name: str, call: str, fault: str, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    work, hit = WORK[name], 0
    for count in range(1, TOO_MANY):
        folder = tmp_path / str(count)
        folder.mkdir()
        work.prepare(folder)
        code = failing(work, folder, call, fault, count)
        if code is None:
            break
        hit += 1
        # finished in spite of it (what was to be removed stays), refused, stopped, killed: never a mistake of ours
        assert code in (0, 2, 75, KILLED), f"call {count}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work.act(folder)
        assert work.left(folder) == wanted[name], f"call {count}"
    assert hit < TOO_MANY - 1


def test_faults_have_names_and_are_many() -> None:
    assert len(set(FAULTS)) >= 40


def test_two_writers_put_into_one_bundle(tmp_path: Path) -> None:
    """Each writes the same file forty times; what is left is one's, and fits its manifest."""
    WORK["put"].prepare(tmp_path)
    children = []
    for writer in (b"one", b"two"):
        child = os.fork()
        if child == 0:
            code = 0
            for _ in range(40):
                try:
                    Bundle.load(tmp_path / "out").put("report.html", writer * 1000)
                except BaseException:
                    code = 1
            os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    bundle = Bundle.load(tmp_path / "out")
    assert (bundle.path / "report.html").read_bytes() in (b"one" * 1000, b"two" * 1000)
    assert [check.name for check in bundle.verify() if not check.ok] == []
