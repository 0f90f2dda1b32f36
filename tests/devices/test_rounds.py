"""Two bundles timed in turns on a device that answers what is planted."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.devices.answers import DeviceFacts, dumped
from quantkit.devices.job import Done, Found, Job, PlacedModel, Rounds, ShapeCell
from quantkit.devices.rounds import DeviceTimer
from quantkit.devices.there import times
from quantkit.errors import InputError
from quantkit.measurement.timing.rounds import RoundsJob, Taken
from quantkit.measurement.timing.shapes import Shape
from quantkit.pipeline.compare.times import of_run

FACTS: dict[str, Any] = {"id": "x", "name": "Cortex", "machine": "aarch64", "isa": "neon", "cores": 4}
SIDE = [[[0.1], [0.1]]] * 6
TIMES: dict[str, Any] = {"seconds": {"candidate": SIDE, "baseline": SIDE}, "rounds": [1] * 6, "skipped": ""}


class Answering:
    """See `devices.link.Link`."""

    name = "pi5"

    def __init__(self, times: Mapping[str, Any], **facts: Any) -> None:
        about = DeviceFacts(**FACTS, memory=1 << 30, versions={}, **facts)
        self.lines = [Found(n=0, cell="about", rows=(dumped(about),)), Found(n=1, cell="decode-1-16", rows=(times,))]
        self.heard: list[str] = []

    def put(self, files: Mapping[str, Path], progress: Any = None) -> None: ...

    def lay_out(self, name: str, files: Mapping[str, str]) -> str:
        return f"bundles/{name}"

    def start(self, job: Job) -> str:
        return job.id

    def follow(self, job: str, after: int = 0) -> Generator[Any]:
        for line in self.lines:
            self.heard.append(line.cell)
            yield line
        yield Done(n=2)

    def cancel(self, job: str) -> None: ...


def job(folder: Path) -> RoundsJob:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "model.onnx").write_bytes(name.encode())
    return RoundsJob(str(folder / "a"), str(folder / "b"), [Shape("decode", 1, 16)], threads=1, seconds=1.0)


@pytest.mark.parametrize(("after", "throttled"), [(3, False), (4, True)])
def test_a_clock_that_was_lowered_is_said(tmp_path: Path, after: int, throttled: bool) -> None:
    link = Answering({**TIMES, "before": {"throttles": 3}, "after": {"throttles": after}})
    taken = DeviceTimer(link)(job(tmp_path), lambda share, words: None)
    assert [each.throttled for each in taken] == [throttled]
    _, notes = of_run(taken, 0.05, device="pi5")
    assert any("lowered its clock" in note for note in notes) == throttled


def test_an_emulator_is_refused_before_its_times(tmp_path: Path) -> None:
    link = Answering(TIMES, emulated=True)
    with pytest.raises(InputError, match=r"\[emulated\] pi5: Cortex is a program"):
        DeviceTimer(link)(job(tmp_path), lambda share, words: None)
    assert link.heard == ["about"]


def test_what_was_timed_before_the_device_started_again_is_not_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Shape]] = []

    def take(loads: Any, shapes: list[Shape], **how: Any) -> list[Taken]:
        asked.append(shapes)
        return [Taken(each, skipped="out-of-memory") for each in shapes]

    monkeypatch.setattr(times.raw, "take", take)
    side = PlacedModel(place="bundles/x", subject="x", format="int4")
    shapes = tuple(ShapeCell(kind="decode", batch=batch, size=16) for batch in (1, 2, 4))
    work = Rounds(ours=side, theirs=side, shapes=shapes).model_dump(mode="json")
    told: Any = SimpleNamespace(rows=[], at=lambda share, words: None)
    told.row = told.rows.append
    times.rounds({"work": work, "workdir": "/", "cells": {"about": [], "decode-2-16": []}}, told)
    assert [row["cell"] for row in told.rows] == ["decode-1-16", "decode-4-16"]
    assert asked == [[Shape("decode", 1, 16), Shape("decode", 4, 16)]]
    times.rounds({"work": work, "workdir": "/", "cells": dict.fromkeys(shape.cell for shape in shapes)}, told)
    assert len(asked) == 1
