"""Time a cell in a process of its own: candidate, baseline and release in turns, round by round (`timing.rounds`).

The repeated step of a bundle in its runtime is:

    decoder   one new token a sequence, with 128 tokens in the cache
    encoder   a pass over 128 tokens a sequence
    graph     a pass over the first samples of its calibration set

A model with room for fewer tokens uses as many as it has. On a device the same code runs there, and its answers are
checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import Field

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import Bundle
from quantkit.bundle.disk import walk
from quantkit.content import Closed, validated
from quantkit.devices.answers import Cells, invalid
from quantkit.devices.named import NamedDevice, Reached, reach
from quantkit.devices.openssh import Lost
from quantkit.errors import InputError, Stopped
from quantkit.measurement.doctor import demand_architecture
from quantkit.measurement.size import folder_of
from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.rounds import CANDIDATE, Task, measure
from quantkit.measurement.timing.schedule import Step, Timing
from quantkit.measurement.timing.speed import opened, samples_of
from quantkit.model.structure.kinds import positions
from quantkit.nightly.records import Side, Time
from quantkit.pipeline.graphs.bundles import file_of, holds_graph, is_network
from quantkit.pipeline.measure import config_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import export_of
from quantkit.runtimes import child, load_runtime
from quantkit.target import Target

TOKENS = 128
# rows of `rounds.measure`: the times of a round, or the error of a side that was left out
Taken = Sequence[Mapping[str, Any]]
Report = Callable[[float, str], None]
# seconds between two checks of a busy device
_LOOK = 20.0


def unloadable(rows: Taken) -> dict[Side, dict[str, str]]:
    """Return sides left out, with the five fields of the error."""
    return {row["unloadable"]: row["error"] for row in rows if "unloadable" in row}


def of_turns(turns: Timing) -> dict[str, Any]:
    """Make the row of a single round from times in turns."""
    return {"round": 0, "turns": turns.as_dict(), "state": {}}


def times(rows: Taken, night: str, cell: str, attempt: int) -> list[Time]:
    """Make the rows of the store; a side that failed to load in any round has none."""
    lost = unloadable(rows)
    return [
        Time(night, cell, attempt, side, row["round"], *step, **row["state"])  # type: ignore[arg-type]
        for row in rows
        if "turns" in row
        for side, *step in Timing.read(row["turns"]).steps()
        if side not in lost
    ]


def run(task: Task, progress: Report | None = None) -> Taken:
    """Time a cell here.

    Raises InputError: errors of the candidate; `timing-failed` if the process dies.
    """
    remedy = "read the system's log; a smaller batch takes less memory"
    where = f"{Path(task.sides[CANDIDATE]).name}, batch {task.batch}"
    return list(child.run(_time, asdict(task), progress, remedy=remedy, died="timing-failed", where=where))


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    task, done = Task(**data), 0
    samples = samples_of(task.samples)

    def load(side: str) -> Step:
        return loaded(Path(task.sides[side]), task.runtime, task.batch, samples)

    for row in measure(task, load, clocks.of_gpu if task.gpu else clocks.of_cpu):
        caller.row(row)
        done += "turns" in row
        caller.at(done / task.rounds, f"round {done} of {task.rounds}")


def loaded(path: Path, runtime: str, batch: int, samples: Mapping[str, NDArray[Any]]) -> Step:
    """Load a bundle and prepare a step.

    Args:
        batch: sequences or samples at once.
        samples: for a graph, an array [n, ...] for each input; otherwise empty.

    Raises:
        InputError: errors of the bundle and the runtime; `out-of-memory`; `not-timed`, a step without meaning.
        MissingDependency: of the runtime.
    """
    bundle = Bundle.load(path)
    if holds_graph(bundle):
        if is_network(bundle) or runtime != "onnxruntime" or not samples:
            value, rule = f"a graph in {runtime}", "graphs are timed in ONNX Runtime"
            remedy = "name `runtimes: [onnxruntime]`"
            raise InputError("not-timed", where=str(path), value=value, rule=rule, remedy=remedy)
        return opened(str(file_of(bundle)), samples, machine.cores()).prefill(batch, 1)
    decodes = bundle.manifest.model.kind == "decoder"
    if runtime == "torch":
        return _in_torch(bundle, batch, decodes=decodes)
    model = load_runtime(runtime).load(bundle)
    # an engine has the capacity that it was built for
    context = int(getattr(model, "capacity", None) or model.context)
    step: Step = (
        model.decode(batch, min(TOKENS, context - 1)) if decodes else model.prefill(batch, min(TOKENS, context))
    )
    return step


def _in_torch(bundle: Bundle, batch: int, *, decodes: bool) -> Step:
    import torch

    from quantkit.measurement.timing.cuda import KernelDecoder

    model = load_runtime("torch").load(bundle)
    model = model.to("cuda") if torch.cuda.is_available() else model
    config = config_of(bundle)
    context = min(TOKENS + 1, positions(config) or TOKENS + 1)
    if decodes:
        return KernelDecoder(model).decode(batch, min(TOKENS, context - 1))
    shape = batch, min(TOKENS, context)
    ids = torch.randint(0, config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(model.device)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids)
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step


# --- on a device -----------------------------------------------------------------------------------------------------

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, lt=1e6)]
_Text = Annotated[str, Field(max_length=2000)]


class _State(Closed):
    clock_hz: _Number | None
    temperature_c: _Number | None
    throttled: bool | None


class _Turns(Closed):
    seconds: dict[Side, list[list[list[_Seconds]]]]
    began: dict[Side, list[list[list[_Number]]]]
    order: list[list[Side]]
    rounds: list[Annotated[int, Field(ge=0)]]


class _Round(Closed):
    round: Annotated[int, Field(ge=0)]
    state: _State
    turns: _Turns

    def is_whole(self) -> bool:
        """Tell whether each side has times of every block."""
        sides, turns = set(self.turns.seconds), self.turns
        if set(turns.began) != sides or any(sorted(order) != sorted(sides) for order in turns.order):
            return False
        shapes = {
            (len(times), tuple(len(visit) for block in times for visit in block), *{len(block) for block in times})
            for both in (turns.seconds, turns.began)
            for times in both.values()
        }
        return len(shapes) == 1 and all(len(times) == len(turns.order) for times in turns.seconds.values())


class _Unloadable(Closed):
    unloadable: Side
    error: dict[Annotated[str, Field(max_length=20)], _Text]


class _Row(Closed):
    row: _Round | _Unloadable


class Timer:
    """A device that times cells, one at a time.

    Args:
        limit: seconds to wait for a busy device.
    """

    def __init__(self, reached: Reached, limit: float) -> None:
        self._reached, self._limit = reached, limit
        self._versions: dict[str, str] = {}

    def run(self, task: Task, progress: Report) -> Taken:
        """Time a cell, see `run`. A lost or stopped device fails only this cell.

        Raises InputError: `emulated`, `device-gone`; errors of the device and of the link.
        """
        with _failing():
            return self._run(task, progress)

    def _run(self, task: Task, progress: Report) -> Taken:
        device, link, name = self._reached, self._reached.link, self._reached.device.name
        folders = {side: _files(Bundle.load(path), task.runtime) for side, path in task.sides.items()}
        weights = {str(path): path for _, files in folders.values() for path in files.values()}
        device.prepare(weights.values(), progress=progress)
        job = {field: getattr(task, field) for field in ("runtime", "batch", "rounds", "blocks", "seconds", "seed")}
        job |= {"sides": {}, "samples": None}
        for side, (inner, files) in folders.items():
            place = link.carry("night", files, progress)
            job["sides"][side] = f"{place}/{inner}" if inner else place
        if task.samples is not None:
            job["samples"] = f"{link.carry('samples', {'samples.npz': Path(task.samples)})}/samples.npz"
        rows: list[dict[str, Any]] = []

        def come(cells: Cells, cell: str) -> None:
            if cell == "about":
                cells.about.demand_times(name)
                self._versions = dict(cells.about.versions)
                return
            rows.extend(self._checked(row) for row in cells[cell])
            if len(rows) > task.rounds + len(folders):
                raise invalid(name, f"more than the requested {task.rounds} rounds")

        try:
            self._waited(lambda: link.run("night", job, progress, row=come), progress)
        except Lost:
            raise
        except Stopped as problem:  # it may end its own work, not the night
            raise InputError(**problem.as_dict()) from None
        return rows

    def now(self) -> dict[str, Any]:
        """Return `device` and `versions` of a result measured there."""
        about, name = self._reached.about, self._reached.device.name
        device: dict[str, Any] = {"id": f"{name}-{about.machine}", "kind": "cpu", "name": about.processor, "on": name}
        device |= {"machine": about.machine, "isa": about.isa[0], "threads": about.cores}
        return {"device": device, "versions": {**self._versions, "quantkit": __version__, "python": about.python}}

    def _waited(self, run: Callable[[], object], progress: Report) -> None:
        """Run a job as soon as the device is free. Raises InputError `device-busy` after the limit."""
        until = time.monotonic() + self._limit
        while True:
            try:
                run()
                return
            except InputError as problem:
                if problem.code != "device-busy" or time.monotonic() + _LOOK > until:
                    raise
                progress(0.0, f"waiting: {problem.value}")
                time.sleep(_LOOK)

    def _checked(self, row: dict[str, Any]) -> dict[str, Any]:
        where = self._reached.device.name
        known = validated(_Row, {"row": row}, where=where, code="answer-invalid").row
        if isinstance(known, _Round) and not known.is_whole():
            rule = "each side has times of every block"
            raise InputError("answer-invalid", where=where, value="times that do not fit together", rule=rule)
        return known.model_dump()


@contextmanager
def _failing() -> Iterator[None]:
    """Turn a lost device into a failure of the cell: `Stopped` would end the night."""
    try:
        yield
    except Lost as problem:
        raise InputError(**problem.as_dict()) from None


@contextmanager
def reached(on: NamedDevice, target: Target, progress: Progress, limit: float) -> Iterator[Timer]:
    """Reach a device able to measure a target's cells.

    Raises InputError: `wrong-machine`, `device-gone`, those of `reach`.
    """
    progress.at("timing", 0.0, f"reaching {on.name}")
    with _failing(), reach(on) as device:
        if target.kind == "cpu":
            demand_architecture(target, device.about.isa)
        elif target.arch.sm not in {gpu.sm for gpu in device.about.gpus}:
            value = ", ".join(f"{gpu.name} (SM {gpu.sm})" for gpu in device.about.gpus) or "no NVIDIA GPU"
            rule, remedy = f"{target.name} has SM {target.arch.sm}", "exclude it in nightly.yaml"
            raise InputError("wrong-machine", where=on.name, value=value, rule=rule, remedy=remedy)
        yield Timer(device, limit)


def _files(bundle: Bundle, runtime: str) -> tuple[str, dict[str, Path]]:
    """List the files loaded by a runtime: a graph's file name, and relative path -> file."""
    if holds_graph(bundle):
        file = file_of(bundle)
        return file.name, {path.name: path for path in sorted(file.parent.glob(f"{file.name}*"))}
    folder = bundle.path / folder_of(export_of(runtime))
    return "", {path.relative_to(folder).as_posix(): path for path in walk(folder)}
