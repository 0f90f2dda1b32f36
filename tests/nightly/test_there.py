"""A cell of a night on a device: what the device says is checked, and what becomes of it is its cell's alone."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from quantkit.devices.answers import DeviceFacts, dumped
from quantkit.devices.job import Failed, Found, Job
from quantkit.devices.named import NamedDevice
from quantkit.devices.ssh.openssh import Lost
from quantkit.errors import InputError
from quantkit.measurement.timing.anew import Task
from quantkit.nightly import there
from quantkit.nightly.build import build
from quantkit.nightly.jobs import BuildJob, JobOutcome, Work
from quantkit.nightly.run import run_night
from quantkit.nightly.timing import CellTimes
from quantkit.pipeline.progress import Progress

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
    seconds = {side: [each.seconds for each in found.times("n", "c", 1) if each.side == side] for side in TASK.sides}
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


class OnANode:
    """An executor of a machine that knows no device: a job comes to it as text."""

    def __init__(self, patch: pytest.MonkeyPatch, settings: Path) -> None:
        self.patch, self.settings = patch, settings

    def ready(self) -> None:
        pass

    def run(self, jobs: Sequence[BuildJob], work: Work, progress: Progress) -> Iterator[JobOutcome]:
        for job in jobs:
            told = json.loads(json.dumps(asdict(job)))
            self.patch.setenv("XDG_CONFIG_HOME", str(self.settings))
            try:
                work(BuildJob(**{**told, "cells": tuple(told["cells"])}), progress)
            except InputError as problem:
                yield JobOutcome.of(job, problem)


def test_a_device_travels_with_its_job_and_one_that_is_lost_at_once_fails_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met: list[NamedDevice] = []

    @contextmanager
    def reach(on: NamedDevice) -> Iterator[None]:
        met.append(on)
        raise Lost("device-gone", where=on.name)
        yield

    monkeypatch.setattr(there, "reach", reach)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    known = NamedDevice(name="pi5", address="ssh://pi@pi5:2222", python="/opt/python", workdir="~/here")
    known.save()
    cells = {"models": ["smollm2-135m"], "recipes": ["rtn-int4"], "targets": ["cpu-arm"], "on": ["pi5"]}
    (tmp_path / "nightly.yaml").write_text(yaml.safe_dump({**cells, "store": "store"}))
    found = run_night(tmp_path / "nightly.yaml", OnANode(monkeypatch, tmp_path / "nobody"), work=build)
    assert met == [known]
    assert [(each.state, each.error and each.error["code"]) for each in found.results] == [("failed", "device-gone")]
