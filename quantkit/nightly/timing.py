"""A cell timed, in a process of its own: candidate, baseline and release in turns, round by round (`timing.rounds`).

What is repeated is one step of a bundle in its runtime:

    decoder   one new token a sequence, with 128 tokens in the cache
    encoder   a pass over 128 tokens a sequence
    graph     a pass over the first samples of its calibration set

Where a model has room for fewer tokens, as many as it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.rounds import CANDIDATE, Task, measure
from quantkit.measurement.timing.schedule import Step, Timing
from quantkit.measurement.timing.speed import samples_of
from quantkit.model.structure.sizes import positions
from quantkit.nightly.records import Side, Time
from quantkit.pipeline.graphs.bundles import file_of, holds_graph, is_network
from quantkit.pipeline.measure import config_of
from quantkit.runtimes import child, load_runtime

if TYPE_CHECKING:
    from quantkit.measurement.timing.schedule import Timeable

TOKENS = 128


@dataclass
class CellTimes:
    """The times of a cell.

    Args:
        rounds: rows of `rounds.measure`, in the order in which they were taken.
        unloadable: side -> the five fields of why it was left out.
    """

    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    unloadable: dict[Side, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> CellTimes:
        """Sort the rows of `rounds.measure`."""
        rows = list(rows)
        lost = {row["unloadable"]: row["error"] for row in rows if "unloadable" in row}
        return cls([row for row in rows if "turns" in row], lost)

    def times(self, night: str, cell: str, attempt: int) -> list[Time]:
        """Return the rows of the store; a side that was left out later had company before, and has none of them."""
        return [
            Time(night, cell, attempt, side, row["round"], *step, **row["state"])  # type: ignore[arg-type]
            for row in self.rounds
            for side, *step in Timing.read(row["turns"]).steps()
            if side not in self.unloadable
        ]


def run(task: Task, progress: Callable[[float, str], None] | None = None) -> CellTimes:
    """Time a cell here.

    Raises:
        InputError: what the candidate raises; `timing-failed` if the process dies.
    """
    remedy = "look into the system's log; a smaller batch takes less memory"
    where = f"{Path(task.sides[CANDIDATE]).name}, batch {task.batch}"
    return CellTimes.of(child.run(_time, asdict(task), progress, remedy=remedy, died="timing-failed", where=where))


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    task = Task(**data)
    samples = samples_of(task.samples)

    def load(side: str) -> Step:
        return loaded(Path(task.sides[side]), task.runtime, task.batch, samples)

    done = 0
    for row in measure(task, load, lambda: clocks.of_gpu() if task.gpu else clocks.of_cpu()):
        caller.row(row)
        done += "turns" in row
        caller.at(done / task.rounds, f"round {done} of {task.rounds}")


def loaded(path: Path, runtime: str, batch: int, samples: Mapping[str, NDArray[Any]]) -> Step:
    """Load a bundle and prepare a step.

    Args:
        batch: sequences or samples at once.
        samples: of a graph, an array [n, ...] for each input; else empty.

    Raises:
        InputError: the bundle's and the runtime's; `out-of-memory`; `not-timed`, where a step would say nothing.
        MissingDependency: of the runtime.
    """
    bundle = Bundle.load(path)
    if holds_graph(bundle):
        return _graph(bundle, runtime, batch, samples)
    decodes = bundle.manifest.model.kind == "decoder"
    if runtime == "torch":
        return _in_torch(bundle, batch, decodes=decodes)
    model = load_runtime(runtime).load(bundle)
    # of an engine, what it was built for
    context = int(getattr(model, "capacity", None) or model.context)
    step: Step = _decode(model, batch, context) if decodes else model.prefill(batch, min(TOKENS, context))
    return step


def _decode(model: Timeable, batch: int, context: int) -> Step:
    return model.decode(batch, min(TOKENS, context - 1))


def _in_torch(bundle: Bundle, batch: int, *, decodes: bool) -> Step:
    import torch

    from quantkit.measurement.timing.cuda import KernelDecoder

    model = load_runtime("torch").load(bundle)
    if torch.cuda.is_available():
        model = model.to("cuda")
    config = config_of(bundle)
    context = min(TOKENS + 1, positions(config) or TOKENS + 1)
    if decodes:
        return _decode(KernelDecoder(model), batch, context)
    shape = batch, min(TOKENS, context)
    ids = torch.randint(0, config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(model.device)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids)
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step


def _graph(bundle: Bundle, runtime: str, batch: int, samples: Mapping[str, NDArray[Any]]) -> Step:
    from quantkit.measurement.timing.speed import opened

    if is_network(bundle) or runtime != "onnxruntime" or not samples:
        raise InputError(
            "not-timed",
            where=str(bundle.path),
            value=f"a graph in {runtime}",
            rule="graphs are timed in ONNX Runtime",
            remedy="name `runtimes: [onnxruntime]`",
        )
    return opened(str(file_of(bundle)), samples, machine.cores()).prefill(batch, 1)
