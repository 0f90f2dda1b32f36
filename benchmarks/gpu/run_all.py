"""What only a GPU can say, by three scripts of at most 8 minutes on a machine with a GPU and no network.

    python3 benchmarks/gpu/run_all.py tax --out results         kernels: right, and how fast beside others
    python3 benchmarks/gpu/run_all.py accuracy --out results    recipes on the card; a compile of 8B's shapes
    python3 benchmarks/gpu/run_all.py step --out results        decode steps of the product path
    python3 benchmarks/gpu/run_all.py step --out results --resume              its stages that are not done yet
    python3 benchmarks/gpu/run_all.py --only correct,race --out results        some stages

Each stage is a process of its own with a time limit. What it finds is told row by row and stands in `OUT/STAGE.json`
while it runs and after it: a crash, a hang, too little memory or the limit loses the rest of one stage, which its file
and `OUT/run.json` say. `run.json` is all of it together, with device, driver, clocks, versions, and under `settles` the
lines of PENDING.md that are settled. A table of it is printed last.

The kernels' stages need torch, Triton and NumPy, the others what `make gpu-bundle` carries, which is unpacked first.
`--dry` runs the same on tiny sizes, on the CPU in Triton's interpreter; its figures mean nothing.

Exit code 0: all asked stages are done. 1: something computes wrongly. 2: a stage was lost. 75: stopped, or the time was
up, and `--resume` goes on. 3: clocks fell during the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import carried  # noqa: E402
from parts import stages  # noqa: E402
from parts.sections import kept, merged, report  # noqa: E402

import quantkit  # noqa: E402
from quantkit import machine  # noqa: E402
from quantkit.errors import InputError, QuantkitError, Stopped  # noqa: E402
from quantkit.runtimes import child  # noqa: E402

# seconds between what a stage stops by itself at and its end; and between two writes of what it has found
_GRACE, _SELDOM = 20.0, 5.0
# of a dry run, on a machine with a GPU too
_DRY = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
# Triton's cache, whose files name its path: the same as where it was filled
_CARD = {"TRITON_CACHE_DIR": str(carried.TRITON)}
# below which a stage is not begun
_LEAST = 10.0


@dataclass(frozen=True)
class Stage:
    """One process.

    Args:
        work: what it does.
        seconds: its limit.
    """

    work: child.Work
    seconds: float


# in the order in which they run
STAGES = (
    {"compile": Stage(stages.compile_kernels, 90), "ceilings": Stage(stages.ceilings, 40)}
    | {"correct": Stage(stages.correct, 60), "race": Stage(stages.race, 60), "solvers": Stage(stages.solvers, 90)}
    | {"tax": Stage(stages.tax, 220), "sweep": Stage(stages.sweep, 420), "steps": Stage(stages.steps, 360)}
    | {"profile": Stage(stages.profile, 90), "real": Stage(stages.real, 250), "model": Stage(stages.model, 300)}
    | {"recipes": Stage(stages.recipes, 240), "rtx": Stage(stages.rtx, 60)}
)
SCRIPTS = {
    "tax": ("compile", "ceilings", "correct", "race", "tax", "sweep"),
    "accuracy": ("compile", "real", "model"),
    "step": ("compile", "steps", "profile"),
}


@dataclass
class Found:
    """What a stage has found so far, as its file has it.

    Args:
        path: of the file.
        stage: its name.
        settings: of the run.
        state: `running`, `done`, `skipped`, `lost`, `stopped`, `no-time`.
        error: what ended it.
        sections: name -> entries in the order in which they came.
    """

    path: Path
    stage: str
    settings: dict[str, Any]
    state: str = "running"
    error: dict[str, str] | None = None
    sections: dict[str, list[Any]] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)
    written: float = 0.0
    seconds: float = 0.0

    def add(self, row: list[Any]) -> None:
        """An entry of a section; the file follows every few seconds."""
        section, data = row
        self.sections.setdefault(section, []).append(data)
        if time.monotonic() - self.written > _SELDOM:
            self.write()

    def write(self) -> None:
        """The file: the old content or the new one, whatever happens."""
        self.written = time.monotonic()
        self.seconds = self.written - self.begin
        write(self.path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **{"schema": 1, "stage": self.stage, "state": self.state, "error": self.error},
            **{"seconds": self.seconds, "settings": self.settings, "sections": self.sections},
        }


def main(arguments: Sequence[str] | None = None, known: dict[str, Stage] | None = None) -> int:
    """Run, write, print.

    Args:
        arguments: of the command line.
        known: stages by name; None: `STAGES`.
    """
    begin, known = time.monotonic(), known or STAGES
    args = _parsed(arguments, known)
    try:
        if not args.dry:
            _gpu()
            for line in carried.unpacked(args.carried):
                print(line)
        with _signals():
            return run(args, known, begin)
    except (QuantkitError, OSError, KeyboardInterrupt) as problem:
        if not isinstance(problem, QuantkitError):
            said = f"{type(problem).__name__} {problem}"
            problem = Stopped("not-written", where=str(args.out), value=said, remedy="see to it, then --resume")
        print(problem.line(), file=sys.stderr)
        return problem.exit


def run(args: argparse.Namespace, known: dict[str, Stage], begin: float) -> int:
    """Run the asked stages one after the other, until `args.minutes` after `begin`.

    Raises InputError `not-writable`, `results-differ`.
    """
    out: Path = args.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError("not-writable", where="--out", value=str(problem), rule="a folder for results") from None
    settings = {"quantkit": quantkit.__version__, "dtype": args.dtype, "dry": args.dry, "blocks": args.blocks}
    asked = [name for name in known if name in args.only]
    for path in (out / f"{name}.json" for name in known):
        if path.exists() and kept(path) is None:
            print(f"{path}: not what a stage writes, taken as not done", file=sys.stderr)
    if args.resume:
        asked = [name for name in asked if not _done(out / f"{name}.json", settings)]
    end = begin + 60.0 * args.minutes
    ended: dict[str, Found] = {}
    for name in asked:
        ended[name] = found = Found(out / f"{name}.json", name, settings)
        left = min(known[name].seconds, end - time.monotonic())
        stopped = any(each.state == "stopped" for each in ended.values())
        if stopped or left < min(_LEAST, known[name].seconds):
            found.state = "stopped" if stopped else "no-time"
        else:
            print(f"{name}: at most {left:.0f} s", flush=True)
            _ran(known[name].work, found, _job(args, name, asked, left), left)
        # what an earlier run has found is not given up for a stage that was not begun
        if found.sections or kept(found.path) is None or found.state not in ("stopped", "no-time"):
            found.write()
        print(f"{name}: {found.state}{', ' + found.error['value'] if found.error else ''}", flush=True)
        write(out / "run.json", merged(out, known))
    record = merged(out, known)
    write(out / "run.json", record)
    return report(record, {name: each.as_dict() for name, each in ended.items()})


def _ran(work: child.Work, found: Found, job: dict[str, Any], seconds: float) -> None:
    """What it finds, and how it ends, is in `found`."""
    found.write()
    try:
        child.run(
            work,
            job,
            where=found.stage,
            died="stage-died",
            remedy=f"--only {found.stage}",
            environment=_DRY if job["dry"] else _CARD,
            seconds=seconds,
            row=found.add,
        )
        found.state = "done"
    except KeyboardInterrupt:
        found.state = "stopped"
    except Stopped as problem:
        found.state, found.error = "stopped", problem.as_dict()
    except QuantkitError as problem:
        found.state = "skipped" if problem.code == stages.SKIPPED else "lost"
        found.error = problem.as_dict()


def _job(args: argparse.Namespace, name: str, asked: list[str], seconds: float) -> dict[str, Any]:
    return {
        **{"stage": name, "stages": asked, "results": str(args.out.resolve()), "dry": args.dry, "dtype": args.dtype},
        **{"blocks": 1 if args.dry else args.blocks, "seconds": seconds, "soft": max(seconds - _GRACE, seconds / 2)},
        **{"sm": args.sm, "layers": args.layers, "target": args.target, "model": args.model},
        **{"bundle": str(carried.UNPACKED), "work": args.work and str(args.work)},
    }


def _done(path: Path, settings: dict[str, Any]) -> bool:
    """Whether a stage need not run again. Raises InputError `results-differ`."""
    if (found := kept(path)) is None:
        return False
    if found["settings"] != settings:
        raise InputError(
            "results-differ",
            where=str(path),
            value=f"made with {found['settings']}",
            rule=f"--resume goes on with the same settings, {settings}",
            remedy="another --out, or leave --resume away",
        )
    return bool(found["state"] == "done")


def write(path: Path, data: Any) -> None:
    """As `bundle/disk.py` does, which needs more than a GPU machine may have."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as stream:
        json.dump(data, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _gpu() -> None:
    """Raises InputError `no-gpu`. Nothing is loaded that would take memory of it."""
    found, why = machine.gpus()
    if not found and shutil.which("nvidia-smi") is None:
        raise InputError(
            "no-gpu",
            value=f"no GPU is at hand: {why}",
            rule="what is measured here is a GPU",
            remedy="--dry checks the plumbing on a CPU",
        )


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM is an interrupt: what is there is kept."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parsed(arguments: Sequence[str] | None, known: dict[str, Stage]) -> argparse.Namespace:
    def some(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no stage is called {wrong[0]!r}; known: {', '.join(known)}")
        return names

    def number(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
        def taken(text: str) -> Any:
            try:
                if least <= (found := kind(text)) < math.inf:
                    return found
            except ValueError:
                pass
            raise argparse.ArgumentTypeError(f"{text!r}: a number from {least} up")

        return taken

    parser = _Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("script", nargs="?", choices=tuple(SCRIPTS), help="its stages; without it, all")
    parser.add_argument("--only", type=some, default=[], metavar="STAGE,...", help=", ".join(known))
    parser.add_argument("--resume", action="store_true", help="leave out what is done in --out")
    parser.add_argument("--minutes", type=number(float, 0), default=8.0, help="for all of it")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of activations and baseline")
    parser.add_argument("--blocks", type=number(int, 1), default=6, help="of A B B A for each comparison")
    architecture = "compile for this architecture instead of the GPU's"
    parser.add_argument("--sm", type=int, choices=(80, 86, 89, 90), help=architecture)
    parser.add_argument(
        "--layers", type=number(int, 1), default=32, help="of the model that `model` compiles and `steps` runs"
    )
    parser.add_argument(
        "--model", default="", help="that `real` compiles; default: smollm2-135m, where it is installed"
    )
    parser.add_argument("--target", default="h200", help="that it is compiled for")
    parser.add_argument("--carried", type=Path, default=HERE.parents[1] / "gpu-bundle", help="of `make gpu-bundle`")
    parser.add_argument("--work", type=Path, help="folder with room for a model and its bundle, 25 GB")
    parser.add_argument("--dry", action="store_true", help="tiny sizes: plumbing only")
    args = parser.parse_args(arguments)
    args.only = args.only or [name for name in SCRIPTS.get(args.script, known) if name in known]
    return args


if __name__ == "__main__":
    sys.exit(main())
