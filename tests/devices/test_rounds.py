"""Two bundles timed in turns on a device that answers what is planted."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from devices.planted import Planted, Told, about, reached
from quantkit.devices import there
from quantkit.devices.asked import DeviceTimer
from quantkit.devices.scores import Outbox
from quantkit.errors import InputError
from quantkit.measurement.timing.rounds import LEAST, RoundsJob
from quantkit.measurement.timing.schedule import Shape, Step
from quantkit.pipeline.sides import of_run

SIDE = [[[0.1], [0.1]]]
PART: dict[str, Any] = {"seconds": {"candidate": SIDE, "baseline": SIDE}, "rounds": [1], "visit": {"burst": 1}}


def answering(rounds: Sequence[Mapping[str, Any]], **facts: Any) -> Planted:
    return Planted(about(**facts), *((f"round-{n}", [dict(row)]) for n, row in enumerate(rounds)))


def job(folder: Path) -> RoundsJob:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "model.onnx").write_bytes(name.encode())
    return RoundsJob(str(folder / "a"), str(folder / "b"), [Shape("decode", 1, 16)], threads=1, seconds=1.0)


def planted(throttles: Sequence[int] = (3,) * 7, **changed: Any) -> list[dict[str, Any]]:
    """Six rounds of a shape, and how often the clock had been lowered at the ends of each."""
    looks = [{"throttles": each} for each in throttles]
    return [
        {"parts": [PART], "took": 1.0, "before": before, "after": after, **changed}
        for before, after in itertools.pairwise(looks)
    ]


@pytest.mark.parametrize(
    ("throttles", "throttled"),
    # the last: the machine has started again, and counts anew
    [((3,) * 7, False), ((3, 3, 3, 3, 3, 3, 4), True), ((3, 4, 4, 4, 4, 4, 4), True), ((9, 9, 9, 9, 1, 2, 2), True)],
)
def test_a_clock_that_was_lowered_is_said(tmp_path: Path, throttles: Sequence[int], throttled: bool) -> None:
    link = answering(planted(throttles))
    taken = DeviceTimer(reached(link))(job(tmp_path), lambda share, words: None)
    assert ["throttled" in each.flags for each in taken] == [throttled]
    _, notes = of_run(taken, 0.05, device="pi5")
    assert any("lowered its clock" in note for note in notes) == throttled


def test_an_emulator_is_refused_before_its_times(tmp_path: Path) -> None:
    link = answering(planted(), emulated=True)
    with pytest.raises(InputError, match=r"\[emulated\] pi5: Cortex is emulated"):
        DeviceTimer(reached(link))(job(tmp_path), lambda share, words: None)
    assert link.heard == ["about"]


RAGGED = {"candidate": SIDE, "baseline": [[[0.1]]]}
LONGER = {side: [[[0.1, 0.1], [0.1, 0.1]]] for side in ("candidate", "baseline")}


@pytest.mark.parametrize(
    "rounds",
    [
        planted()[:5],
        [*planted()] * 7,
        planted(parts=[]),
        planted(parts=[PART, PART]),
        planted(parts=[{**PART, "seconds": {}}]),
        planted(parts=[{**PART, "seconds": RAGGED}]),
        planted(parts=[{**PART, "seconds": {"candidate": SIDE, "other": SIDE}}]),
        # a burst of two after bursts of one
        [*planted(), *planted(parts=[{**PART, "seconds": LONGER}])],
    ],
)
def test_rounds_that_do_not_fit_together_are_refused(tmp_path: Path, rounds: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="answer-invalid"):
        DeviceTimer(reached(answering(rounds)))(job(tmp_path), lambda share, words: None)


def test_what_did_not_fit_in_one_round_has_no_times(tmp_path: Path) -> None:
    rounds = [*planted(), *planted(parts=[{"skipped": "out-of-memory"}])]
    (taken,) = DeviceTimer(reached(answering(rounds)))(job(tmp_path), lambda share, words: None)
    assert (taken.seconds, taken.skipped) == ({}, "out-of-memory")


class Model:
    """See `Timeable`: counts its loads."""

    loads = 0

    def __init__(self, *_: Any) -> None:
        Model.loads += 1

    def decode(self, batch: int, context: int) -> Step:
        return lambda: 0.1


def test_no_round_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power goes off in the middle of the fourth."""
    monkeypatch.setattr(there.speed, "opened", Model)
    monkeypatch.setattr(there.speed, "demand_room", lambda paths: None)
    shapes = [{"kind": "decode", "batch": batch, "size": 16} for batch in (1, 2)]
    asked: dict[str, Any] = {"candidate": "x", "baseline": "x", "runtimes": ["onnxruntime"] * 2, "shapes": shapes}
    asked |= {"seconds": 1e-3, "seed": 0, "samples": ""}
    told: Any = Told()

    def at(share: float, words: str) -> None:
        if len(told.cells) == 3 and words == "round 4, decode, batch 2, context 16":
            raise KeyboardInterrupt

    told.at = at
    with pytest.raises(KeyboardInterrupt):
        there.rounds(asked, Outbox(told, {}))
    assert Model.loads == 2 * 4
    before = dict(told.cells)
    told.at = lambda share, words: None
    there.rounds(asked, Outbox(told, before))
    assert Model.loads == 2 * 4 + 2 * 3
    after = dict(told.cells)
    assert list(after) == [f"round-{n}" for n in range(LEAST)]
    assert {cell: after[cell] for cell in before} == before
    # and of one that was cut off behind its last, nothing is
    there.rounds(asked, Outbox(told, after))
    assert Model.loads == 2 * 4 + 2 * 3
