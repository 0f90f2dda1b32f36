"""How a cell is timed, here and on a device: who is visited when, what is kept, what becomes of a lost side."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from quantkit.measurement.timing.clocks import Clocks
from quantkit.measurement.timing.rounds import Task, measure
from quantkit.nightly import timing
from quantkit.nightly.build import build
from quantkit.nightly.config import TimeBudget
from quantkit.nightly.evidence import paired
from quantkit.nightly.records import BuildJob, Time
from quantkit.nightly.run import run_night
from quantkit.nightly.timing import times
from quantkit.pipeline.many.jobs import JobOutcome, Work
from quantkit.pipeline.progress import Progress
from quantkit.stats.slowdown import BURST, SETTLE

from .conftest import CELLS, FIRST

SECONDS = {"candidate": 2e-3, "baseline": 1e-3, "release": 1e-3}
Loads = list[str]


def task(*sides: str, **others: Any) -> Task:
    budget = TimeBudget(**{"rounds": 3, "blocks": 7, **others})
    return Task(
        rounds=budget.rounds,
        blocks=budget.most,
        seconds=budget.seconds,
        sides={side: f"./{side}" for side in sides},
        runtime="onnxruntime",
        batch=1,
        seed=5,
    )


def loading(loads: Loads, fails: dict[str, int] | None = None) -> Callable[[str], Callable[[], object]]:
    """Sides that take their time, and fail at a given load."""

    def load(side: str) -> Callable[[], object]:
        loads.append(side)
        if loads.count(side) == (fails or {}).get(side):
            raise InputError("hash-mismatch", where=side)
        return lambda: time.sleep(SECONDS[side])

    return load


def taken(given: Task, load: Any, look: Callable[[], Clocks] = Clocks) -> tuple[list[Time], list[dict[str, Any]]]:
    # as the parent reads it
    rows = [json.loads(json.dumps(row)) for row in measure(given, load, look)]
    kept = [row for row in rows if "turns" in row]
    return times(kept, FIRST, CELLS[0].key, 1), [row for row in rows if "turns" not in row]


def test_rounds_load_all_sides_anew_and_blocks_pair_them() -> None:
    loads: Loads = []
    steps, lost = taken(task("candidate", "baseline", "release"), loading(loads))
    assert not lost
    assert Counter(loads) == {"candidate": 3, "baseline": 3, "release": 3}
    assert len({tuple(loads[i : i + 3]) for i in (0, 3, 6)}) > 1, "always in one order"
    for other in ("baseline", "release"):
        ours, theirs, rounds = paired(steps, other, "")  # type: ignore[arg-type]
        assert ours.shape == theirs.shape == (7, 2, BURST)
        assert sorted(rounds) == [2, 2, 3], "seven blocks over three rounds"
        # wall clock on a busy machine: the sides are not mixed up, that is all
        assert (ours.min() > 1.9e-3) and 0.9e-3 < theirs.min() < ours.min()
    began = [each.began for each in steps]
    assert began == sorted(began) and abs(began[0] - time.time()) < 60


def test_a_block_is_a_palindrome() -> None:
    steps, _ = taken(task("candidate", "baseline"), loading([]))
    orders = set()
    for number in {(each.round, each.block) for each in steps}:
        block = [each for each in steps if (each.round, each.block) == number]
        visits = [each.side for each in sorted(block, key=lambda each: each.began)][::BURST]
        assert visits == visits[::-1] and len(visits) == 4
        assert [each.position for each in block if each.side == "candidate"] in ([0, 1, 6, 7], [2, 3, 4, 5])
        orders.add(visits[0])
    assert orders == {"candidate", "baseline"}


def test_the_first_night_times_the_candidate_alone() -> None:
    steps, _ = taken(task("candidate"), loading([]))
    assert {each.side for each in steps} == {"candidate"} and len(steps) == 7 * 2 * BURST


def test_a_side_that_does_not_load_is_left_out_with_its_reason() -> None:
    steps, lost = taken(task("candidate", "baseline", "release"), loading([], {"baseline": 2}))
    assert [row["unloadable"] for row in lost] == ["baseline"] and lost[0]["error"]["code"] == "hash-mismatch"
    assert {each.side for each in steps if each.round > 0} == {"candidate", "release"}
    paired(steps, "release", "")


def test_a_candidate_that_does_not_load_is_an_error() -> None:
    with pytest.raises(InputError, match="hash-mismatch"):
        taken(task("candidate", "baseline"), loading([], {"candidate": 1}))


def test_seconds_instead_of_blocks() -> None:
    steps, _ = taken(task("candidate", rounds=2, blocks=None, seconds=0.1), loading([]))
    blocks = Counter(each.round for each in steps)
    assert set(blocks) == {0, 1} and all(1 <= count / (2 * BURST) < 20 for count in blocks.values())


def test_short_steps_are_run_several_times_and_told_by_their_mean() -> None:
    calls: list[float] = []

    def step() -> float:
        calls.append(time.sleep(1e-4) or 1e-4)
        return calls[-1]  # says itself how long it took: nothing else on the machine changes that

    steps, _ = taken(task("candidate", rounds=1, blocks=1), lambda side: step)
    counted = 2 * (BURST + SETTLE)
    assert len(calls) == 2 + 10 * counted and len(steps) == 2 * BURST
    assert all(each.seconds > 1e-4 for each in steps)


def test_what_the_device_was_at_stands_with_its_round() -> None:
    looks = iter([Clocks(2e9, 40.0, 7), Clocks(3e9, 50.0, 7), Clocks(2e9, 60.0, 7), Clocks(2e9, 70.0, 8)])
    steps, _ = taken(task("candidate", rounds=2, blocks=2), loading([]), lambda: next(looks))
    found = {(each.round, each.clock_hz, each.temperature_c, each.throttled) for each in steps}
    assert found == {(0, 2.5e9, 50.0, False), (1, 2e9, 70.0, True)}


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


def test_a_night_keeps_the_times_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (Planted(about(emulated=True)), r"emulated.*Cortex is emulated"),
        (Planted(about(cores="many")), "answer-invalid"),
        (Planted(row(order=[])), "answer-in"),
        (Planted(*(row() for _ in range(4))), "answer-invalid.*more than the requested 1 rounds"),
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
