"""A cell of a night on a device: what the device says is checked, and what becomes of it is its cell's alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from devices.planted import Planted, about, reached

from quantkit.devices.named import NamedDevice
from quantkit.devices.openssh import Lost
from quantkit.devices.probed import Probed
from quantkit.errors import InputError, Stopped
from quantkit.measurement.timing.rounds import Task
from quantkit.nightly import timing
from quantkit.nightly.build import build
from quantkit.nightly.jobs import BuildJob, JobOutcome, Work
from quantkit.nightly.run import run_night
from quantkit.pipeline.progress import Progress

TURNS = {
    "seconds": {"candidate": [[[0.1], [0.2]]], "baseline": [[[0.1], [0.2]]]},
    "began": {"candidate": [[[0.0], [1.0]]], "baseline": [[[0.5], [2.0]]]},
    "order": [["candidate", "baseline"]],
    "rounds": [1],
}
STATE = {"clock_hz": None, "temperature_c": 40.0, "throttled": False}
TASK = Task({"candidate": "a", "baseline": "b"}, "onnxruntime", 1, 1, 1, None, 0)


def timed(monkeypatch: pytest.MonkeyPatch, link: Planted) -> tuple[timing.Timer, timing.Taken]:
    monkeypatch.setattr(timing, "_files", lambda bundle, runtime: ("", {}))
    monkeypatch.setattr(timing.Bundle, "load", lambda path: path)
    board: dict[str, Any] = {"machine": "aarch64", "processor": "Cortex", "isa": ["neon"], "cores": 4}
    probed = Probed.model_construct(**board, python="3.12.1", memory=1 << 40, memory_free=1 << 40)
    timer = timing.Timer(reached(link, probed), 10.0)
    return timer, timer.run(TASK, lambda share, words: None)


def row(**changes: Any) -> tuple[str, list[dict[str, Any]]]:
    return "round-0", [{"round": 0, "state": STATE, "turns": {**TURNS, **changes}}]


def test_times_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, found = timed(monkeypatch, Planted(about(), row()))
    seconds = {
        side: [each.seconds for each in timing.times(found, "n", "c", 1) if each.side == side] for side in TASK.sides
    }
    assert seconds == {"candidate": [0.1, 0.2], "baseline": [0.1, 0.2]}
    assert timer.now()["versions"]["numpy"] == "2"


class Stops(Planted):
    """A device that has stopped by itself."""

    def run(self, *_: Any, **__: Any) -> Any:
        raise Stopped("disk-full", where="pi5 says: rows")


@pytest.mark.parametrize(
    ("link", "error"),
    [
        (Planted(row(), cut="round-0"), "device-gone"),
        (Stops(), r"disk-full\] pi5 says: rows"),
        (Planted(about(emulated=True)), r"emulated.*Cortex is a program"),
        (Planted(about(cores="many")), "answer-invalid"),
        (Planted(row(order=[])), "answer-in"),
        (Planted(*(row() for _ in range(4))), "answer-invalid.*more than the 1 rounds"),
    ],
    ids=["lost", "stopped", "emulator", "facts", "times", "more"],
)
def test_what_becomes_of_a_device_fails_its_cell_and_not_the_night(
    monkeypatch: pytest.MonkeyPatch, link: Planted, error: str
) -> None:
    with pytest.raises(InputError, match=error):
        timed(monkeypatch, link)


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

    monkeypatch.setattr(timing, "reach", reach)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    known = NamedDevice(name="pi5", address="ssh://pi@pi5:2222", python="/opt/python", workdir="~/here")
    known.save()
    cells = {"models": ["smollm2-135m"], "recipes": ["rtn-int4"], "targets": ["cpu-arm"], "on": ["pi5"]}
    (tmp_path / "nightly.yaml").write_text(yaml.safe_dump({**cells, "store": "store"}))
    found = run_night(tmp_path / "nightly.yaml", OnANode(monkeypatch, tmp_path / "nobody"), work=build)
    assert met == [known]
    assert [(each.state, each.error and each.error["code"]) for each in found.results] == [("failed", "device-gone")]
