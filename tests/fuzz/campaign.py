"""Mutants by the thousand, each classed by what became of it.

    python -m fuzz.campaign --minutes 5              all targets in turn, from tests/
    python -m fuzz.campaign onnx gguf --mutants 1000 --seed 7

    clean    it was read, or refused by an InputError with a code of its own
    other    any other exception: a user would read `internal-error`
    hang     longer than 5 seconds, or than its target says
    memory   more than 1.5 GB
    died     the process ended: a crash in a library
    silent   a file that was changed where a hash covers it, and was read as if it were not

A worker is a process of its own with those limits. It says which mutant it is at before it reads it, so that one that
kills it is known, and kept.
"""

import argparse
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEMORY = 3 << 29
KEPT = 20


@dataclass
class Outcome:
    """What became of the mutants of one target.

    Args:
        target: its name.
        counts: outcome -> mutants.
        examples: of those that were not clean: outcome, seed of the mutant, what was said.
    """

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Mutants that were not clean."""
        return self.counts.total() - self.counts["clean"]


class HangError(BaseException):
    """A mutant took too long."""


def late(*_: object) -> None:
    raise HangError


def classed(target: Any, folder: Path) -> tuple[str, str]:
    """(outcome, what was said) of one mutant in its folder."""
    from fuzz.targets import SilentError
    from quantkit.errors import QuantkitError, printable

    signal.setitimer(signal.ITIMER_REAL, target.hang)
    try:
        target.read(folder)
    except QuantkitError as error:
        line = error.line()
        if error.code == "internal-error" or printable(line) != line:
            return "other", line
    except HangError:
        return "hang", ""
    except SilentError:
        return "silent", ""
    except MemoryError as error:
        return "memory", str(error)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/quantkit/" in frame.filename]
        last = (own or frames)[-1]
        return "other", f"{Path(last.filename).name}:{last.lineno}: {type(error).__name__}: {str(error)[:160]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "clean", ""


def work(name: str, first: int, count: int, seconds: float) -> None:
    """A worker: mutants `first`, `first + 1`, …; a line of JSON for each that is not clean, and for every hundredth."""
    from fuzz.targets import BY_NAME
    from quantkit.errors import QuantkitError

    target = BY_NAME[name]
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, late)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = target.seed(folder)
        honest = file.read_bytes()
        with suppress(QuantkitError):
            target.read(folder)  # imports what it reads with, for longer than a mutant may take
        kind, said = classed(target, folder)
        if kind != "clean":
            print(json.dumps({"outcome": kind, "number": -1, "said": f"the honest file is not read: {said}"}), file=out)
            return
        ends = time.monotonic() + seconds  # what is imported first takes seconds
        for number in range(first, first + count):
            if time.monotonic() > ends:
                break
            mutant = target.mutate(honest, random.Random(f"{name} {number}"))
            file.write_bytes(mutant)
            print(json.dumps({"at": number}), file=out, flush=True)
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                kind, said = classed(target, folder)
            if kind != "clean":
                print(json.dumps({"outcome": kind, "number": number, "said": said}), file=out, flush=True)
    print(json.dumps({"done": True}), file=out, flush=True)


def run(name: str, *, first: int = 0, count: int = 10**9, seconds: float = 1e9, guided: bool = False) -> Outcome:
    """A target's mutants, in workers; one that dies is followed by another. `guided`: by coverage, see `guided.py`."""
    found = Outcome(name)
    left = seconds
    while count > 0 and left > 0:
        at, done = None, False
        command = [sys.executable, "-m", "fuzz.campaign", "--worker", name, str(first), str(count)]
        command.append(str(left))
        if guided:
            command = [sys.executable, "-m", "fuzz.guided", name, str(left)]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        said_of: set[int] = set()
        for line in process.stdout:
            data = json.loads(line)
            if "at" in data:
                if at is not None and at not in said_of:
                    found.counts["clean"] += 1
                at = data["at"]
            elif "outcome" in data:
                said_of.add(data["number"])
                found.counts[data["outcome"]] += 1
                if len(found.examples) < KEPT:
                    found.examples.append(data)
            else:
                done = True
        process.wait()
        done = done or (guided and process.returncode == 0)
        left -= time.monotonic() - started
        if at is None:
            if not found.bad:
                found.counts["died"] += 1
                said = f"exit {process.returncode} before the first mutant"
                found.examples.append({"outcome": "died", "number": first, "said": said})
            break
        if done:
            found.counts["clean"] += at not in said_of
            break
        found.counts["died"] += 1
        found.examples.append({"outcome": "died", "number": at, "said": f"exit {process.returncode}"})
        count -= at + 1 - first
        first = at + 1
    return found


def main() -> int:
    """The campaign of the command line; its exit code is 1 if a mutant was not clean."""
    from fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="all, where none is named")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--mutants", type=int, default=10**9, help="of each target, at most")
    parser.add_argument("--seed", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--guided", action="store_true", help="by coverage, where atheris is installed")
    parser.add_argument("--jobs", type=int, default=2, help="workers at one time")
    parser.add_argument("--out", type=Path, help="a file for the outcomes, as JSON")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], int(options.worker[1]), int(options.worker[2]), float(options.worker[3]))
        return 0
    names = options.targets or [target.name for target in TARGETS]
    guided = options.guided and importlib.util.find_spec("atheris") is not None
    share = 60 * options.minutes * options.jobs / len(names)
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        made = pool.map(
            lambda name: run(name, first=options.seed, count=options.mutants, seconds=share, guided=guided), names
        )
        for outcome in made:
            outcomes.append(outcome)
            print(f"{outcome.target:18} {dict(outcome.counts)}", flush=True)
            for said, times in _said(outcome):
                print(ascii(f"    {times:3} {said}")[1:-1], flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([vars(each) for each in outcomes], indent=1))
    total, bad = sum(each.counts.total() for each in outcomes), sum(each.bad for each in outcomes)
    print(f"{total:,} mutants, {bad} not clean")
    return int(bad > 0)


def _said(outcome: Outcome) -> Iterator[tuple[str, int]]:
    counts = Counter(f"{each['outcome']} {each['said']} (mutant {each['number']})" for each in outcome.examples)
    yield from counts.most_common(8)


if __name__ == "__main__":
    raise SystemExit(main())
