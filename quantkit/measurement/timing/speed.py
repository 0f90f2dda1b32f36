"""Time the export of a bundle beside that of its baseline, in a process of their own.

In a separate process, the threads and memory of this one do not affect the figures, and the models do not count toward
its peak. The baseline is the same exporter's output for the unquantized model: same runtime, same fusions, same
threads, other weights. A third side in another runtime may take turns with them.

A graph that is not a transformer has no tokens and reads a whole sample at once. One pass over a batch of samples
counts as a prefill of one token a sequence.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Baseline, Device, Row
from quantkit.measurement.timing.latency import TimedSide, measure
from quantkit.measurement.timing.schedule import (
    BASELINE,
    SUBJECT,
    Array,
    Step,
    TimingPlan,
    Visit,
    interleave,
    runs_of,
    warm,
)
from quantkit.runtimes import Graph, Session, child, load_runtime
from quantkit.runtimes.child import Report
from quantkit.runtimes.onnxruntime.open import open_graph
from quantkit.stats.abba import Comparison

RUNTIME = "onnxruntime"
# size of the step that proves that an export runs
_TOKENS = 8
_BATCH, _CONTEXT = 1, 128
# for two graphs: fewest and most blocks; seconds after which no block begins
_BLOCKS, _SECONDS = (8, 40), 3.0
_REMEDY = "try smaller batches: quantkit measure BUNDLE --batch 1,2,4"


@dataclass(frozen=True)
class SpeedSide:
    """One side of a timing.

    Args:
        path: folder with `model.onnx` or `model.gguf`, or a graph's file.
        subject: name in the rows.
        format: format of its weights.
        weight_bytes: bytes of all constants of a graph.
        runtime: its runtime: `onnxruntime`, `quantkit_cpu`, `llama_cpp` or `openvino`.
    """

    path: str
    subject: str
    format: str
    weight_bytes: float = 0.0
    runtime: str = RUNTIME


@dataclass(frozen=True)
class Samples:
    """Inputs of a graph.

    Args:
        file: .npz with an array [n, ...] for each input; repeated for a larger batch.
        macs: multiply-accumulates of one sample.
        outputs: output numbers of one sample.
    """

    file: str
    macs: float
    outputs: float


@dataclass(frozen=True)
class SpeedJob:
    """Sides and shapes to time.

    Args:
        ours: side to judge.
        theirs: side to compare with.
        threads: threads of both sides.
        plan: shapes and time.
        samples: inputs of graphs; None for transformers.
        across: third side, in another runtime.
    """

    ours: SpeedSide
    theirs: SpeedSide
    threads: int
    plan: TimingPlan
    samples: Samples | None = None
    across: SpeedSide | None = None

    @property
    def sides(self) -> list[SpeedSide]:
        """Sides of the job; the first is to be judged."""
        return [self.ours, self.theirs, *([self.across] if self.across else [])]


def demand(runtimes: Collection[str] = (RUNTIME,)) -> None:
    """Refuse to begin if a package is missing; `runtimes`: those of the sides.

    Raises MissingDependency: scipy; onnxruntime or llama-cpp-python.
    """
    loaded = [load_runtime(name) for name in runtimes]
    needed = {"scipy": "onnx"} | {package: runtime.extra for runtime in loaded for package in runtime.imports}
    for package, extra in needed.items():
        if not machine.has(package):
            raise MissingDependency(package, extra=extra, purpose="measuring speed")


def demand_room(models: Sequence[Path]) -> None:
    """Refuse to load models beyond the free memory: folders with `model.onnx` or `model.gguf`, or graphs' files.

    Raises InputError: `out-of-memory`.
    """
    need, free = sum(2.2 * _bytes(model) for model in models), machine.memory_available()
    if need > free:
        value, rule = f"the models take about {need / 1e9:.1f} GB", f"{free / 1e9:.1f} GB are free"
        remedy = "measure on a machine with more memory"
        raise InputError("out-of-memory", where=str(models[0]), value=value, rule=rule, remedy=remedy)


def _bytes(model: Path) -> int:
    files = model.iterdir() if model.is_dir() else model.parent.glob(f"{model.stem}.*")
    return sum(path.stat().st_size for path in files)


def run(job: SpeedJob, progress: Report | None = None) -> list[Row]:
    """Time both sides and, unless they are graphs, weigh them. Rows: those of `latency.measure` and `memory.peak`.

    Raises InputError: `out-of-memory`, they do not fit; `onnx-unreadable`, `gguf-unreadable`, `speed-failed`;
    MissingDependency: onnxruntime, llama-cpp-python or scipy.
    """
    demand({part.runtime for part in job.sides})
    weighed: list[dict[str, int]] = []
    if job.samples is None:
        demand_room([Path(part.path) for part in job.sides])
        with ThreadPoolExecutor() as both:
            weighed = list(both.map(partial(footprint, threads=job.threads), (job.ours, job.theirs)))
    rows = [*map(Row.model_validate, child.run(_time, asdict(job), progress, remedy=_REMEDY))]
    if not weighed:
        return rows
    how: dict[str, Any] = {"subjects": (job.ours.subject, job.theirs.subject), "runtime": job.ours.runtime}
    how |= {"threads": job.threads, "device": machine.device(), "versions": machine.versions()}
    return [*rows, memory_row(*weighed, **how)]


def footprint(part: SpeedSide, threads: int) -> dict[str, int]:
    """Weigh one side in a process of its own.

    Returns:
        `resident` and `peak` bytes of a process that has loaded it and made a step after `context` tokens, or an
        encoder's pass over `new_tokens`; `before`: bytes of the interpreter alone.
    """
    sizes: dict[str, int]
    (sizes,) = child.run(_weigh, {"side": asdict(part), "threads": threads}, remedy=_REMEDY)
    return sizes


def memory_row(
    ours: Mapping[str, int],
    theirs: Mapping[str, int],
    *,
    subjects: tuple[str, str],
    runtime: str,
    threads: int,
    device: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Row:
    """Return `memory.peak` from the `footprint` of both sides."""
    return Row(
        name="memory.peak",
        value=ours["peak"],
        unit="B",
        stat="max",
        better="lower",
        n=1,
        subject=subjects[0],
        baseline=Baseline(subject=subjects[1], value=theirs["peak"], ratio=theirs["peak"] / ours["peak"]),
        batch=_BATCH,
        shape={"new_tokens": ours["new_tokens"], "context": ours["context"]},
        runtime=runtime,
        settings={"threads": threads, "baseline_resident": theirs["resident"], "interpreter": ours["before"]},
        resident_bytes=ours["resident"],
        device=Device.model_validate(dict(device)),
        versions=dict(versions),
        flags=["one-process", "with-interpreter"],
    )


def compared(
    subject: bytes, baseline: bytes, feeds: Mapping[str, Array], threads: int, *, seconds: float = _SECONDS
) -> Comparison:
    """Run two whole graphs on the same inputs in turns in ONNX Runtime, and compare their times.

    Args:
        threads: threads of one operator.
        seconds: approximate duration.

    Raises InputError: `onnx-unreadable`; MissingDependency: onnxruntime, scipy.
    """
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-trial-") as place:
        for name, model in ((SUBJECT, subject), (BASELINE, baseline)):
            path = Path(place) / f"{name}.onnx"
            path.write_bytes(model)
            steps[name] = partial(open_graph(path, threads).run, None, dict(feeds))
    longest = max(warm(step) for step in steps.values())
    visit = Visit.fitting(longest, runs=runs_of(longest))
    generator = np.random.default_rng(0)
    timing = interleave(steps, blocks=_BLOCKS, seconds=seconds, generator=generator, visit=visit)
    times = timing.compared(SUBJECT, BASELINE)
    assert times is not None
    return times


# --- in the child ----------------------------------------------------------------------------------------------------


class Passes:
    """A loaded graph as `schedule.Timeable`."""

    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, run: Callable[[Mapping[str, Array]], object], samples: Mapping[str, Array]) -> None:
        self._run, self._samples = run, samples

    def decode(self, batch: int, context: int) -> Step:
        """Refuse a decode step: a graph has no cache."""
        raise InputError("not-a-decoder", where="a graph", value="a decode step", rule="only decoders have a cache")

    def prefill(self, batch: int, tokens: int) -> Step:
        """See `Timeable`."""
        feed = {
            name: np.ascontiguousarray(np.resize(array, (batch, *array.shape[1:])))
            for name, array in self._samples.items()
        }
        return lambda: self._run(feed)


def samples_of(file: str | None) -> dict[str, Array]:
    """Read the arrays of a .npz; an empty dictionary without a file."""
    if not file:
        return {}
    with np.load(file, allow_pickle=False) as loaded:
        return {name: loaded[name] for name in loaded.files}


def opened(path: str, samples: Mapping[str, Array], threads: int, runtime: str = RUNTIME) -> Session | Passes:
    """Open a folder with `model.onnx` or `model.gguf`; with samples, open a graph's file. Raises as `open_graph`."""
    if samples:
        return Passes(opened_graph(Path(path), threads, runtime), samples)
    return load_runtime(runtime).opens(Path(path), threads)


def opened_graph(file: Path, threads: int, runtime: str) -> Graph:
    """Open a graph's file to run it on a batch. Raises InputError: the runtime's errors."""
    return load_runtime(runtime).opens_graph(file, threads)


def stepped(path: Path, runtime: str, *, graph: bool) -> None:
    """Load an export, and run a step if its inputs are known.

    Args:
        graph: True for a graph's file, False for a transformer's folder.

    Raises InputError: the runtime's errors.
    """
    if graph:
        opened_graph(path, machine.cores(), runtime)
        return
    model: Any = opened(str(path), {}, machine.cores(), runtime)
    (model.decode if model.decoder else model.prefill)(1, min(_TOKENS, model.context - 1))()


def sides(job: SpeedJob) -> tuple[list[TimedSide], dict[str, Any]]:
    """Load every side of a job, and return the sides with the settings of their rows.

    Raises InputError: those of `open_graph`.
    """
    samples = samples_of(job.samples.file if job.samples else None)
    loaded, noted = [], []
    for part in job.sides:
        model = opened(part.path, samples, job.threads, part.runtime)
        if isinstance(model, Passes):
            cost = _cost_of_graph(part, job.samples, samples)
        else:
            cost = StepCost(part.format, **model.work())
        loaded.append(TimedSide(cost, part.subject, runtime=part.runtime, model=model))
        noted.append(model.settings)
    ours, theirs = loaded[:2]
    settings: dict[str, Any] = {"threads": job.threads, "compute_type": ours.cost.compute}
    settings["baseline_format"] = theirs.cost.format
    settings |= {key: value for key, value in noted[0].items() if key != "threads"}
    return loaded, settings


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    graph = None if data["samples"] is None else Samples(**data["samples"])
    parts = {side: SpeedSide(**data[side]) for side in ("ours", "theirs", "across") if data[side]}
    job = SpeedJob(**parts, threads=data["threads"], plan=TimingPlan(**data["plan"]), samples=graph)
    (ours, theirs, *across), settings = sides(job)
    rows = measure(
        ours,
        theirs,
        runtime=ours.runtime,
        settings=settings,
        across=next(iter(across), None),
        device=machine.device(),
        versions=machine.versions(),
        plan=job.plan,
        progress=caller.at,
    )
    for row in rows:
        caller.row(row.as_dict())


def _cost_of_graph(part: SpeedSide, graph: Samples | None, samples: Mapping[str, Array]) -> StepCost:
    assert graph is not None
    read = float(sum(array.nbytes / len(array) for array in samples.values()))
    return StepCost(
        part.format,
        part.weight_bytes,
        flops_per_token=2.0 * graph.macs,
        io_bytes_per_token=read + 4.0 * graph.outputs,
        compute="int8" if part.format == "int8" else "fp32",
    )


def _weigh(data: Mapping[str, Any], caller: child.Caller) -> None:
    before = _status("VmRSS")
    part = SpeedSide(**data["side"])
    model = load_runtime(part.runtime).opens(Path(part.path), data["threads"])
    if model.decoder:
        new, context = 1, min(_CONTEXT, model.context - 1)
        model.decode(_BATCH, context)()
    else:
        new, context = min(_CONTEXT, model.context), 0
        model.prefill(_BATCH, new)()
    sizes = {"before": before, "resident": _status("VmRSS"), "peak": _status("VmHWM")}
    caller.row({**sizes, "new_tokens": new, "context": context})


def _status(key: str) -> int:
    """Return bytes of a line of /proc/self/status; without /proc, the largest resident size so far."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
