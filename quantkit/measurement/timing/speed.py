"""A bundle's ONNX and its baseline's, timed side by side in a process of their own.

In one of their own, so that what else this process has loaded, its threads and its memory, is not part of the figures,
and the two models are not part of its peak. The baseline is the same exporter's graph of the unquantized model: same
fusions, same threads, other weights.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.operators.tax import Cost
from quantkit.measurement.rows import Baseline, Device, Row
from quantkit.measurement.timing.latency import Entry, Plan, measure
from quantkit.runtimes import child
from quantkit.runtimes.onnxruntime.session import MODEL, Loaded

RUNTIME = "onnxruntime"
_BATCH, _CONTEXT = 1, 128


@dataclass(frozen=True)
class Part:
    """One side.

    Args:
        folder: with `model.onnx`.
        subject: identity for the rows.
        format: of its weights.
    """

    folder: str
    subject: str
    format: str


@dataclass(frozen=True)
class Job:
    """What is to be timed.

    Args:
        ours: what is judged.
        theirs: what it is set against.
        threads: of both.
        plan: shapes and time.
    """

    ours: Part
    theirs: Part
    threads: int
    plan: Plan


def demand() -> None:
    """Refuse to begin what needs a package that is not there.

    Raises:
        MissingDependency: onnxruntime or scipy.
    """
    for package in ("onnxruntime", "scipy"):
        if not machine.has(package):
            raise MissingDependency(package, extra="onnx", purpose="measuring speed")


def demand_room(models: Sequence[Path]) -> None:
    """Refuse to load what does not fit: folders with `model.onnx`, or graphs' files.

    Raises:
        InputError: `out-of-memory`.
    """
    need, free = sum(2.2 * _bytes(model) for model in models), machine.memory_available()
    if need > free:
        raise InputError(
            "out-of-memory",
            where=str(models[-1]),
            value=f"both models take about {need / 1e9:.1f} GB",
            rule=f"{free / 1e9:.1f} GB are free",
            remedy="measure on a machine with more memory",
        )


def run(job: Job, progress: Callable[[float, str], None] | None = None) -> list[Row]:
    """Time both and weigh both; see `measure.latency` for the rows; `memory.peak` besides.

    Raises:
        InputError: `out-of-memory`, the two do not fit; `onnx-unreadable`, `speed-failed`.
        MissingDependency: onnxruntime or scipy.
    """
    demand()
    demand_room([Path(part.folder) for part in (job.ours, job.theirs)])
    weighed = {part.subject: footprint(part, job.threads) for part in (job.theirs, job.ours)}
    lines = _child(["time"], json.dumps(asdict(job)), progress)
    rows = [Row.model_validate(json.loads(line)) for line in lines]
    return [*rows, _memory(job, weighed)]


def footprint(part: Part, threads: int) -> dict[str, int]:
    """`resident` and `peak` bytes of a process that has loaded one side and made a step after `context` tokens, or an
    encoder's pass over `new_tokens`; of the interpreter `before`.
    """
    (line,) = _child(["weigh", part.folder, str(threads)], "", None)
    found: dict[str, int] = json.loads(line)
    return found


def _bytes(model: Path) -> int:
    files = model.glob(f"{MODEL}*") if model.is_dir() else model.parent.glob(f"{model.name}*")
    return sum(path.stat().st_size for path in files)


def _memory(job: Job, weighed: Mapping[str, Mapping[str, int]]) -> Row:
    ours, theirs = weighed[job.ours.subject], weighed[job.theirs.subject]
    return Row(
        name="memory.peak",
        value=ours["peak"],
        unit="B",
        stat="max",
        better="lower",
        n=1,
        subject=job.ours.subject,
        baseline=Baseline(subject=job.theirs.subject, value=theirs["peak"], ratio=theirs["peak"] / ours["peak"]),
        batch=_BATCH,
        shape={"new_tokens": ours["new_tokens"], "context": ours["context"]},
        runtime=RUNTIME,
        settings={"threads": job.threads, "baseline_resident": theirs["resident"], "interpreter": ours["before"]},
        resident_bytes=ours["resident"],
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
        flags=["one-process", "with-interpreter"],
    )


def _child(arguments: list[str], text: str, progress: Callable[[float, str], None] | None) -> list[str]:
    """Lines that a child process printed. Raises InputError: what the child met, or `speed-failed`."""
    remedy = "try smaller batches: quantkit measure BUNDLE --batch 1,2,4"
    return child.lines(__name__, arguments, text, progress, remedy=remedy)


def _cost(model: Loaded, part: Part) -> Cost:
    """From what the exporter noted in the file."""

    def noted(name: str) -> float:
        return float(model.meta.get(f"quantkit.{name}", 0))

    return Cost(
        part.format,
        noted("step_bytes") or model.weight_bytes,
        model.cache_bytes,
        noted("flops"),
        noted("attention_flops"),
        head_flops=noted("head_flops"),
        float_bytes=noted("float_bytes"),
        float_head_flops=noted("float_head_flops"),
        io_bytes_per_token=4.0 * model.features,
        compute="int8" if model.accuracy_level == 4 else "fp32",
    )


def _time(data: Mapping[str, Any]) -> None:
    ours, theirs = Part(**data["ours"]), Part(**data["theirs"])
    threads, plan = data["threads"], Plan(**data["plan"])
    entries = []
    for part in (ours, theirs):
        model = Loaded(Path(part.folder), threads=threads)
        entries.append(Entry(model, _cost(model, part), part.subject))
    settings: dict[str, Any] = {"threads": threads, "accuracy_level": entries[0].side.accuracy_level}  # type: ignore[attr-defined]
    settings["compute_type"] = entries[0].cost.compute
    settings["baseline_format"] = theirs.format
    rows = measure(
        entries[0],
        entries[1],
        runtime=RUNTIME,
        settings=settings,
        device=machine.device(),
        versions=machine.versions(),
        plan=plan,
        progress=lambda share, words: print(f"at {share} {words}", flush=True),
    )
    for row in rows:
        print(f"row {row.line()}", flush=True)


def _weigh(folder: str, threads: str) -> None:
    before = _status("VmRSS")
    model = Loaded(Path(folder), threads=int(threads))
    if model.decoder:
        new, context = 1, min(_CONTEXT, model.context - 1)
        model.decode(_BATCH, context)()
    else:
        new, context = min(_CONTEXT, model.context), 0
        model.prefill(_BATCH, new)()
    sizes = {"before": before, "resident": _status("VmRSS"), "peak": _status("VmHWM")}
    found = {**sizes, "new_tokens": new, "context": context}
    print(f"row {json.dumps(found)}", flush=True)


def _status(key: str) -> int:
    """Bytes; where there is no /proc, the most that was resident so far."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(arguments: list[str]) -> None:
    """The child: `time` with a job on stdin, or `weigh FOLDER THREADS`."""
    child.answering(lambda: _time(json.load(sys.stdin)) if arguments[0] == "time" else _weigh(*arguments[1:]))
