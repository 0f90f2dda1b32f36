"""What a device answers is data: what cannot be is refused, in one line."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from devices.planted import Told
from quantkit.devices import there
from quantkit.devices.answers import LINE, NUMBERS, Cells, MadeTokens, SessionSettings, Times, read
from quantkit.devices.scores import Outbox, outputs, positions
from quantkit.devices.sides import outputs_of
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Accuracy
from quantkit.measurement.timing.clocks import Clocks
from quantkit.measurement.timing.rounds import Task, measure
from quantkit.measurement.timing.schedule import Shape, Timing
from quantkit.stats.slowdown import BURST

SHAPE, BOTH = Shape("decode", 1, 16), {"subject", "baseline"}
SIDE = [[[0.1], [0.2]], [[0.1], [0.2]]]
TIMES: dict[str, Any] = {"seconds": {"subject": SIDE, "baseline": SIDE}, "rounds": [1, 1], "skipped": ""}


def answered(cell: str, *rows: Any) -> Cells:
    found = Cells("pi5")
    found.add(cell, rows)
    return found


def answers(told: Told, done: Any = ()) -> Outbox:
    return Outbox(told, dict(done))  # type: ignore[arg-type]


def test_times_are_taken_as_they_are() -> None:
    timing = read(Times, TIMES, "pi5").timing(BOTH, "pi5", SHAPE)
    assert (timing.shape, timing.rounds) == (SHAPE, (1, 1))
    assert np.array_equal(timing.seconds["subject"], np.array(SIDE))


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": [1]},
        {"seconds": {"subject": SIDE}},
        {"seconds": {"subject": SIDE, "baseline": [[[0.1], [0.2, 0.3]], [[0.1], [0.2]]]}},
        {"seconds": {"subject": SIDE, "baseline": [[[-1.0], [0.2]]] * 2}},
        {"seconds": {"subject": SIDE, "baseline": [[["0x1"], [0.2]]] * 2}},
        {"path": "../../etc/passwd"},
        {"skipped": "$(reboot)"},
        {"before": {"clock_hz": "fast"}},
        {"seconds": {"subject": SIDE, "baseline": [[[5e-324], [0.2]]] * 2}},
    ],
    ids=["rounds", "a side", "ragged", "negative", "no number", "more", "no flag", "no clock", "no time"],
)
def test_times_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="answer-invalid") as refused:
        read(Times, {**TIMES, **change}, "pi5").timing(BOTH, "pi5")
    assert "\n" not in refused.value.line()


@pytest.mark.parametrize(
    "change", [{"ids": [1 << 40]}, {"ids": [-1]}, {"seconds": -1.0}, {"first_token_s": 1e308}], ids=str
)
def test_tokens_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    made: dict[str, Any] = {"ids": [1, 2], "seconds": 1.0, "first_token_s": 0.5}
    assert answered("made", made).one(MadeTokens, "made").ids == (1, 2)
    with pytest.raises(InputError, match="answer-invalid"):
        answered("made", made | change).one(MadeTokens, "made")


@pytest.mark.parametrize(
    "row",
    [
        {"first": 0, "shapes": {"y": [2, 3]}, "numbers": [0.0] * 5},
        {"first": 1, "shapes": {"y": [2, 3]}, "numbers": [0.0] * 6},
        {"first": 0, "shapes": {"y": [9, 3]}, "numbers": [0.0] * 27},
        {"first": 0, "shapes": {"y": [1 << 40, 1 << 40]}, "numbers": []},
        {"first": 0, "shapes": {}, "numbers": []},
        {"first": 0, "shapes": {"y": []}, "numbers": [0.0]},
        {"first": 0, "shapes": {"y": [2, 3]}, "numbers": [0.0] * 3, "at": 3},
        {"first": 0, "shapes": {"y": [2, 3], "x": [1, 3]}, "numbers": [0.0] * 9},
        {"first": 0, "shapes": {"y": [2, 1 << 20]}, "numbers": [0.0] * (NUMBERS + 1)},
    ],
    ids=[
        *("too few numbers", "other samples", "too many", "enormous", "none", "no sample", "a gap", "not as many"),
        "more than a line",
    ],
)
def test_outputs_that_cannot_be_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="answer-invalid"):
        outputs_of(answered("outputs-0", row), 2)


def test_outputs_of_a_large_network_come_in_several_lines() -> None:
    generator = np.random.default_rng(0)
    given = {"y": generator.normal(0, 1e-5, (10, 50, 201)).astype(np.float32), "z": np.arange(10, dtype=np.int64)}
    told = Told()
    outputs(10, lambda part: {name: array[part] for name, array in given.items()}, answers(told))
    assert len(told.cells) > 2
    for name, array in outputs_of(told.cells, 10).items():
        np.testing.assert_array_equal(array, given[name])
    # what was answered before is not answered again
    again = Told()
    outputs(10, lambda part: {n: array[part] for n, array in given.items()}, answers(again, told.cells))
    assert not again.cells
    with pytest.raises(InputError, match=r"outputs-too-many.*each gives 10,051 numbers"):
        outputs(1000, lambda part: {"y": np.zeros((8, 10_051))}, answers(again))


def test_a_round_of_a_night_is_a_line() -> None:
    """However short its steps are."""
    sides = ("candidate", "baseline", "release")
    blocks = there.most(len(sides))
    times = {side: np.full((blocks, 2, BURST), 1764107543.1234567 / 3) for side in sides}
    turns = Timing(times, times, [sides] * blocks, (blocks,))
    row = {"cell": "round-0", "rows": [{"round": 0, "state": {}, "turns": turns.as_dict()}]}
    assert LINE / 2 < len(f"row {json.dumps(row)}") < LINE
    task = Task({"candidate": "x"}, "onnxruntime", 1, 2, None, 1.0, 0, most=3)
    rows = list(measure(task, lambda side: lambda: None, Clocks))
    assert [row["turns"]["rounds"] for row in rows] == [[3], [3]]


def test_what_was_answered_takes_as_much_memory_as_its_text() -> None:
    text = '{"x":[' + ",".join(["[]"] * 300_000) + "]}"
    cells = Cells("pi5")
    tracemalloc.start()
    cells.add("x", (json.loads(text),))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cells["x"] == [json.loads(text)]
    assert kept < 2 * len(text) < 10 * len(text) < peak


def test_positions_are_scored_as_torch_scores_them() -> None:
    generator = np.random.default_rng(0)
    original = generator.normal(0, 4, (37, 101)).astype(np.float32)
    candidate = original + generator.normal(0, 0.3, original.shape).astype(np.float32)
    original[3, 7] = -np.inf  # a token that the original rules out
    following = generator.integers(8, 101, 37)
    expected = Accuracy()
    expected.add_positions(0, *map(torch.from_numpy, (following, original, candidate)))
    items = expected.items()
    for name, values in positions(following, original.copy(), candidate).items():
        np.testing.assert_allclose(values, getattr(items, name), rtol=2e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("settings", [{"provider": "\x1b[2J"}, {"a\nb": 1}, {"provider": "x" * 3000}])
def test_what_is_shown_of_a_device_moves_no_cursor(settings: dict[str, str]) -> None:
    with pytest.raises(InputError, match="answer-invalid"):
        read(SessionSettings, {"settings": settings}, "box")
    assert read(SessionSettings, {"settings": {"provider": "CPU, ü"}}, "box").settings
