"""Prompts beside a verdict: a decoder's verdict rests on its steps, and a prompt multiplies many rows at a time.

A length is faster or slower if the whole interval of its ratio, the one that is believed, lies on one side of 1; of
several batches the slowest decides. Else it is open. There are ten prompts a side, so no 99th percentile has a say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quantkit.bundle import PromptVerdict, Verdict
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import listed, sentence, speed_up

Standing = Literal["slower", "open", "faster"]
# what decides a length that was measured at several batches comes first
_GRAVEST: tuple[Standing, ...] = ("slower", "open", "faster")


def with_prompts(found: Verdict, rows: Sequence[Row], *, setting: str = "") -> Verdict:
    """A verdict on decode steps with what holds of prompts, and what to use where it gains nothing.

    Args:
        rows: those that the verdict rests on, and prefills among them.
        setting: of the recipe, with which many rows at once are faster: `onnx.prefill=int8`.
    """
    worst = _worst(rows)
    by = {each: [length for length, (_, state) in worst.items() if state == each] for each in _GRAVEST}
    prompts = PromptVerdict(faster=by["faster"], slower=by["slower"], open=by["open"]) if worst else None
    ends = list(dict.fromkeys([*list(worst)[:1], *list(worst)[-1:]]))
    because = [*found.because, *(sentence(worst[length][0]) for length in ends)]
    lost = [f"batches above {found.batch}"] if found.answer == "ship_up_to" else []
    lost += ["the other batches"] if found.answer == "intervals" else []
    # where there is a setting, what gains nothing is told of it too
    behind = sorted([*by["slower"], *(by["open"] if setting else [])])
    lost += [f"prompts of {listed(behind)} tokens"] if behind else []
    if not lost:
        return found.model_copy(update={"prompts": prompts, "because": because})
    other = f"compile with `--set {setting}`, or use " if setting else "use "
    instead = f"for {' and '.join(lost)}: {other}the float model (`--recipe float`)"
    return found.model_copy(update={"prompts": prompts, "instead": instead, "because": [*because, instead]})


def _worst(rows: Sequence[Row]) -> dict[int, tuple[Row, Standing]]:
    """Tokens -> the row that decides, ascending."""
    found: dict[int, tuple[Row, Standing]] = {}
    for row in rows:
        if row.name != "latency.prefill" or (speed := speed_up(row)) is None:
            continue
        low, high = speed.interval
        believed = not speed.open
        state: Standing = "faster" if low > 1 and believed else "slower" if high < 1 and believed else "open"
        length = (row.shape or {}).get("new_tokens", 0)
        if length not in found or _GRAVEST.index(state) < _GRAVEST.index(found[length][1]):
            found[length] = row, state
    return dict(sorted(found.items()))
