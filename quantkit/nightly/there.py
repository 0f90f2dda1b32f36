"""A cell timed on a device: as `timing` does it here, by the same code there, and what comes back is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

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
from quantkit.measurement.timing.rounds import Task
from quantkit.nightly.records import Side
from quantkit.nightly.timing import CellTimes
from quantkit.pipeline.graphs.bundles import file_of, holds_graph
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import export_of
from quantkit.target import Target

Report = Callable[[float, str], None]
# seconds between two looks whether a device is free
_LOOK = 20.0
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Taken = Annotated[float, Field(gt=0, lt=1e6)]
_Text = Annotated[str, Field(max_length=2000)]


class _State(Closed):
    clock_hz: _Number | None
    temperature_c: _Number | None
    throttled: bool | None


class _Turns(Closed):
    seconds: dict[Side, list[list[list[_Taken]]]]
    began: dict[Side, list[list[list[_Number]]]]
    order: list[list[Side]]
    rounds: list[Annotated[int, Field(ge=0)]]


class _Round(Closed):
    round: Annotated[int, Field(ge=0)]
    state: _State
    turns: _Turns

    def is_whole(self) -> bool:
        """Whether each side has times of each block."""
        sides, turns = set(self.turns.seconds), self.turns
        if set(turns.began) != sides or any(sorted(order) != sorted(sides) for order in turns.order):
            return False
        shapes = {
            (len(found), tuple(len(visit) for block in found for visit in block), *{len(block) for block in found})
            for both in (turns.seconds, turns.began)
            for found in both.values()
        }
        return len(shapes) == 1 and all(len(found) == len(turns.order) for found in turns.seconds.values())


class _Unloadable(Closed):
    unloadable: Side
    error: dict[Annotated[str, Field(max_length=20)], _Text]


class _Row(Closed):
    row: _Round | _Unloadable


class Timer:
    """A device that times cells, one at a time.

    Args:
        reached: it.
        limit: seconds that it is waited for while it is at work for somebody else.
    """

    def __init__(self, reached: Reached, limit: float) -> None:
        self._reached, self._limit = reached, limit
        self._versions: dict[str, str] = {}

    def run(self, task: Task, progress: Report) -> CellTimes:
        """See `timing.run`. A device that is lost, or has stopped by itself, fails the cell: the night goes on.

        Raises:
            InputError: `emulated`, `device-gone`; what the device answers, those of the link.
        """
        with failing():
            return self._run(task, progress)

    def _run(self, task: Task, progress: Report) -> CellTimes:
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
                raise invalid(name, f"more than the {task.rounds} rounds that were asked for")

        try:
            self._waited(lambda: link.run("night", job, progress, row=come), progress)
        except Lost:
            raise
        except Stopped as problem:  # it may stop itself, not the night
            raise InputError(**problem.as_dict()) from None
        return CellTimes.of(rows)

    def now(self) -> dict[str, Any]:
        """`device` and `versions` of a result that was measured there."""
        about, name = self._reached.about, self._reached.device.name
        device: dict[str, Any] = {"id": f"{name}-{about.machine}", "kind": "cpu", "name": about.processor, "on": name}
        device |= {"machine": about.machine, "isa": about.isa[0], "threads": about.cores}
        return {"device": device, "versions": {**self._versions, "quantkit": __version__, "python": about.python}}

    def _waited(self, run: Callable[[], object], progress: Report) -> None:
        """Run it once the device is free. Raises InputError `device-busy`, it is not in time."""
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
        found = validated(_Row, {"row": row}, where=where, code="answer-invalid").row
        if isinstance(found, _Round) and not found.is_whole():
            rule = "each side has times of each block"
            raise InputError("answer-invalid", where=where, value="times that do not fit together", rule=rule)
        return found.model_dump()


@contextmanager
def failing() -> Iterator[None]:
    """A device that is lost fails what is measured on it: `Stopped` would end the night."""
    try:
        yield
    except Lost as problem:
        raise InputError(**problem.as_dict()) from None


@contextmanager
def reached(on: NamedDevice, target: Target, progress: Progress, limit: float) -> Iterator[Timer]:
    """A device that cells of a target can be measured on.

    Raises:
        InputError: `wrong-machine`, `device-gone`, those of `reach`.
    """
    progress.at("timing", 0.0, f"reaching {on.name}")
    with failing(), reach(on) as found:
        if target.kind == "cpu":
            demand_architecture(target, found.about.isa)
        elif target.arch.sm not in {gpu.sm for gpu in found.about.gpus}:
            value = ", ".join(f"{gpu.name} (SM {gpu.sm})" for gpu in found.about.gpus) or "no NVIDIA GPU"
            rule = f"{target.name} has SM {target.arch.sm}"
            raise InputError(
                "wrong-machine", where=on.name, value=value, rule=rule, remedy="exclude it in nightly.yaml"
            )
        yield Timer(found, limit)


def _files(bundle: Bundle, runtime: str) -> tuple[str, dict[str, Path]]:
    """What a runtime loads of a bundle: of a graph its file's name, and relative path -> file."""
    if holds_graph(bundle):
        file = file_of(bundle)
        return file.name, {path.name: path for path in sorted(file.parent.glob(f"{file.name}*"))}
    folder = bundle.path / folder_of(export_of(runtime))
    return "", {path.relative_to(folder).as_posix(): path for path in walk(folder)}
