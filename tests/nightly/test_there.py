"""A cell of a night on a device: what the device says is checked, and what becomes of it is its cell's alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.devices.answers import DeviceFacts, dumped
from quantkit.devices.job import Failed, Found, Job
from quantkit.devices.ssh.openssh import Lost
from quantkit.errors import InputError
from quantkit.measurement.timing.anew import Task
from quantkit.nightly.running import there
from quantkit.nightly.running.timing import CellTimes
from quantkit.pipeline.progress import Progress
from quantkit.target import Target

FACTS: dict[str, Any] = {"id": "x", "name": "Cortex", "machine": "aarch64", "isa": "neon", "cores": 4}
ABOUT = DeviceFacts(**FACTS, memory=1 << 30, versions={"numpy": "2"})
TURNS = {
    "seconds": {"candidate": [[[0.1], [0.2]]], "baseline": [[[0.1], [0.2]]]},
    "began": {"candidate": [[[0.0], [1.0]]], "baseline": [[[0.5], [2.0]]]},
    "order": [["candidate", "baseline"]],
    "rounds": [1],
}
STATE = {"clock_hz": None, "temperature_c": 40.0, "throttled": False}
TASK = Task({"candidate": "a", "baseline": "b"}, "onnxruntime", 1, 1, 1, None, 0)


class Answering:
    """A link whose device answers what is planted; an error among it is met."""

    def __init__(self, *lines: Any) -> None:
        self.lines, self.closed = lines, False

    def start(self, job: Job) -> str:
        return job.id

    def follow(self, job: str, after: int = 0) -> Generator[Any]:
        try:
            for line in self.lines:
                if isinstance(line, Exception):
                    raise line
                yield line
        except GeneratorExit:
            self.closed = True
            raise


def timed(monkeypatch: pytest.MonkeyPatch, link: Answering) -> tuple[there.Timer, CellTimes]:
    monkeypatch.setattr(there, "_files", lambda bundle, runtime: ("", {}))
    monkeypatch.setattr(there.Bundle, "load", lambda path: path)
    about = SimpleNamespace(
        demand_memory=lambda models, where: None,
        machine="aarch64",
        processor="Cortex",
        isa=["neon"],
        cores=4,
        python="3.12.1",
    )
    reached: Any = SimpleNamespace(
        device=SimpleNamespace(name="pi5"),
        about=about,
        link=link,
        install=lambda progress: None,
        carry=lambda name, files, progress: "bundles/x",
    )
    timer = there.Timer(reached, 10.0)
    return timer, timer.run(TASK, lambda share, words: None)


def about(**changes: Any) -> Found:
    return Found(n=0, cell="about", rows=({**dumped(ABOUT), **changes},))


def test_times_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Found(n=1, cell="round-0", rows=({"round": 0, "state": STATE, "turns": TURNS},))
    timer, found = timed(monkeypatch, Answering(about(), row))
    seconds = {side: [each.seconds for each in found.iterations if each.side == side] for side in TASK.sides}
    assert seconds == {"candidate": [0.1, 0.2], "baseline": [0.1, 0.2]}
    assert timer.now()["versions"]["numpy"] == "2"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (Lost("device-gone", where="pi5"), "device-gone"),
        (Failed(n=1, code="disk-full", where="rows", exit=75), r"disk-full\] pi5 says: rows"),
        (about(emulated=True), r"emulated.*Cortex is a program"),
        (about(cores="many"), "answer-invalid"),
        (
            Found(n=1, cell="round-0", rows=({"round": 0, "state": STATE, "turns": {**TURNS, "order": []}},)),
            "answer-in",
        ),
    ],
    ids=["lost", "stopped", "emulator", "facts", "times"],
)
def test_what_becomes_of_a_device_fails_its_cell_and_not_the_night(
    monkeypatch: pytest.MonkeyPatch, line: Any, error: str
) -> None:
    link = Answering(line, about())
    with pytest.raises(InputError, match=error):
        timed(monkeypatch, link)
    assert link.closed == (not isinstance(line, Exception))


def test_a_device_that_is_lost_at_once_fails_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def reach(on: str) -> Iterator[None]:
        raise Lost("device-gone", where=on)
        yield

    monkeypatch.setattr(there, "reach", reach)
    with pytest.raises(InputError, match="device-gone"), there.reached("pi5", Target.load("cpu-arm"), Progress(), 1.0):
        pass
