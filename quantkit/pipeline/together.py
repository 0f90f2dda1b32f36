"""Ranks in one compile: what they hold against each other before the work, and what those that do not lead do.

The first rank owns the build: it alone commits, exports, scores and prints. The others solve their share of each block,
and end with the last one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit import machine
from quantkit.bundle import Build
from quantkit.errors import InputError, QuantkitError, Told
from quantkit.limits import read
from quantkit.model.device import AUTO
from quantkit.pipeline.progress import Progress, Stages
from quantkit.pipeline.subject import Subject

if TYPE_CHECKING:
    from quantkit.calibrate.ranks import Ranks

T = TypeVar("T")

# what may differ between ranks: a place on each machine, and each rank's own GPU
_OWN = ("model", "device")
_WORDS = {"source": "model files", "files": "importance matrix", "isa": "instruction set", "threads": "threads"}


@contextmanager
def joined(patience: float, device: str) -> Iterator[tuple[Ranks, str]]:
    """Meet the other ranks, and let one of them tell an error.

    Args:
        patience: seconds after which a silent rank is lost.
        device: device of the computation, as it was asked for.

    Yields:
        the ranks; the device of this one.

    Raises InputError: `ranks-invalid`; Stopped: `rank-lost`; Told: another rank tells the error.
    """
    # torch logs a stack for every lost connection; one line of ours says it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from quantkit.calibrate.ranks import Ranks

    ranks = Ranks.joined(patience, on_gpus=device.startswith("cuda"))
    with ranks.told_once():
        if device == AUTO:
            rule = "each rank would choose for itself"
            raise InputError("device-absent", "--device", AUTO, rule, "--device cpu, or --device cuda: one GPU a rank")
        yield ranks, f"cuda:{ranks.local}" if device == "cuda" else device


def by_all(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do a piece of work on every rank, and end all where one refuses. Raises those of `work`; Told: another rank's."""
    try:
        result = work()
    except QuantkitError as problem:
        ranks.agree(problem.exit)
        raise
    if refused := max(ranks.agree(0)):
        raise Told(refused)
    return result


def met(ranks: Ranks, opening: Callable[[], Subject]) -> Subject:
    """Open the subject on every rank, and compare.

    Raises InputError: `ranks-differ`; those of `opening`; Told: another rank's.
    """
    subject = by_all(ranks, opening)
    told = ranks.agree({key: value for key, value in subject.fingerprint().items() if key not in _OWN})
    for number, one in enumerate(told):
        here = told[0]
        if other := [key for key in {**here, **one} if here.get(key) != one.get(key)]:
            value = "; ".join(f"{_WORDS.get(key, key)}: {_between(here.get(key), one.get(key))}" for key in other)
            rule = f"it differs from rank 0 of {ranks.count}: all compile the same, by the same versions"
            raise InputError(
                "ranks-differ", f"rank {number}", value, rule, "give each rank the same files, options and packages"
            )
    return subject


def _between(here: Any, there: Any) -> str:
    """Describe a difference: by the keys of two mappings, else by both values."""
    if isinstance(here, dict) and isinstance(there, dict):
        other = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        return ", ".join(f"{key} {_between(here.get(key), there.get(key))}" for key in other[:3])
    return f"{str(there)[:24]}, not {str(here)[:24]}"


def begun(subject: Subject, ranks: Ranks, beginning: Callable[[], Build]) -> Build:
    """Begin the build on the first rank; the others do their share here, and end in `Told`.

    Raises InputError: `out-unseen`, those of `beginning`; Told: on other ranks than the first, when all is done.
    """
    if not ranks.leads:
        _assist(subject, ranks)
        raise Told(0)
    try:
        build = beginning()
    except QuantkitError as problem:
        ranks.agree({"exit": problem.exit})
        raise
    if build.finished is not None:
        ranks.agree({"exit": None})
        return build
    sign = secrets.token_hex()
    with ExitStack() as failing:
        failing.push(build)
        build.temporary("ranks").write_text(sign)
        ranks.agree({"exit": 0, "out": str(build.out), "sign": sign})
        seen = ranks.agree(True)
        if not all(seen):
            where, rule = str(build.folder), "all ranks read and write the folder of the build"
            value = f"rank {seen.index(False)} does not see it"
            raise InputError("out-unseen", where, value, rule, "--out in a folder that all machines share")
        failing.pop_all()
    return build


def _assist(subject: Subject, ranks: Ranks) -> None:
    begun_there = ranks.agree(None)[0]
    if begun_there["exit"] is None:  # it is finished already
        return
    if begun_there["exit"]:
        raise Told(begun_there["exit"])
    build = Build.beside(Path(begun_there["out"]))
    sign = build.steps / "temporary" / "ranks"
    seen = ranks.agree(sign.is_file() and read(sign).decode() == begun_there["sign"])
    if not all(seen):
        raise Told(InputError.exit)
    subject.begin(build, Progress(), Stages())
    with subject.device.strict.arithmetic(), machine.modules_apart():
        subject.assist()
