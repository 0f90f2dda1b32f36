"""Which of several formats to ship: a pure function of their rows and of the traffic.

Each format has its own verdict (`measurement.verdict`). Of those that win, at every batch or up to one, the best is the
one whose steps take least time over the traffic; without traffic the one that wins at most batches, and of equals the
one with the largest mean gain. Swap two formats' times, and the advice swaps.

    the subject is the best         its own verdict
    another one is                  use that instead, up to the batch to which it wins
    none wins, some are undecided   inconclusive: noise hides whether one does
    none wins                       do not quantize here
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from quantkit.bundle import Verdict
from quantkit.errors import InputError
from quantkit.measurement.verdict import MeasuredFormat, over_traffic, speed_up, state, verdict

_WINNING = ("ship_it", "ship_up_to")
_REASONS = 3


def verdicts(
    measured: Sequence[MeasuredFormat], batches: Iterable[int], traffic: Mapping[int, float] | None = None
) -> list[Verdict]:
    """The verdict on each format, named in its `format`; `not_measured` where no batch of it could be timed."""
    wanted = sorted(set(batches))
    found = []
    for each in measured:
        try:
            own = verdict(each, wanted, traffic=traffic)
        except InputError as error:
            if error.code != "not-measured":
                raise
            flags = ", ".join(sorted({flag for row in each.rows for flag in row.flags if row.value is None}))
            reason = f"nothing was timed: {flags}" if flags else "nothing was timed"
            own = Verdict(answer="not_measured", because=[reason])
        found.append(own.model_copy(update={"format": each.format}))
    return found


def advise(
    measured: Sequence[MeasuredFormat],
    batches: Iterable[int],
    *,
    traffic: Mapping[int, float] | None = None,
    subject: str = "",
) -> Verdict:
    """What to do, with up to three reasons.

    Args:
        measured: formats, all against one baseline.
        batches: that matter, where there is no traffic.
        traffic: batch -> share of the steps.
        subject: the format that is asked about; "": whichever is best.

    Returns:
        `format` is what the answer is about: that to ship, or that to use instead.

    Raises:
        InputError: `no-batches`, `traffic-invalid`; `not-measured` if there is no format at all.
    """
    wanted = sorted(set(batches))
    judged = verdicts(measured, wanted, traffic)
    if not judged:
        raise InputError("not-measured", where="--format", value="no format", rule="advice compares formats")
    winning = [
        (own, each) for own, each in zip(judged, measured, strict=True) if own.answer in _WINNING and not own.forecast
    ]
    if not winning:
        return _nothing(judged, subject)
    best, _ = max(winning, key=lambda pair: _gain(pair[1], wanted, traffic))
    asked = next((own for own in judged if own.format == subject), None)
    if asked is None or asked.format == best.format:
        return best
    because = [f"{asked.format}: {reason}" for reason in asked.because[:1]]
    because += [f"{best.format}: {reason}" for reason in best.because]
    return best.model_copy(update={"answer": "use_instead", "because": because[:_REASONS]})


def _nothing(judged: Sequence[Verdict], subject: str) -> Verdict:
    """What is left where no format wins at its first batches."""
    for answer in ("intervals", "inconclusive"):
        found = [own for own in judged if own.answer == answer]
        if found:
            return next((own for own in found if own.format == subject), found[0])
    because = [f"{own.format}: {reason}" for own in judged for reason in own.because[:1]]
    about = subject or (judged[0].format if len(judged) == 1 else None)
    return Verdict(answer="do_not_quantize", format=about, because=because[:_REASONS])


def _gain(each: MeasuredFormat, wanted: Sequence[int], traffic: Mapping[int, float] | None) -> tuple[float, float]:
    """What a format is ranked by, larger is better."""
    if traffic is not None:
        times = over_traffic(each.rows, traffic)
        return (1.0, times[1] / times[0]) if times else (0.0, 0.0)
    rows = [row for row in each.rows if row.batch in wanted and row.baseline is not None and row.baseline.ratio]
    rows = [row for row in rows if (speed := speed_up(row)) is not None and not speed.doubt]
    wins = sum(state(row) == "wins" for row in rows) / (len(rows) or 1)
    logs = [math.log(row.baseline.ratio) for row in rows if row.baseline is not None and row.baseline.ratio]
    return wins, sum(logs) / (len(logs) or 1)
