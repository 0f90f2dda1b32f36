"""Give the verdict on a format from measured rows, checks and batches: ship it, or do not quantize here.

The first line that applies:

    a check failed             use another measured format that passes and wins, else do not quantize here
    every batch wins           ship it
    the first batches win      ship it up to batch B
    no batch wins              do not quantize here; inconclusive if noise may hide a batch that wins
    any other pattern          the intervals of batches that win; inconclusive if only noise makes the gaps
    with traffic               inconclusive if more of the traffic is open than wins

A batch **wins** if it wins at every measured context: the whole interval of the p50 ratio lies above 1, and p99 is no
worse. The interval includes the A/A spread (`stats.evidence`), so a gain within that spread does not win. **p99 is
worse** if the whole interval of its ratio lies below 1, with at least 100 steps a side. With fewer steps p99 is about
the slowest step, and its interval is too narrow (equal sides differ in 5 to 9 of 100 runs instead of 2), so it is not
judged, and the reason says so. A batch is **open** if its interval includes both 1 and a gain of more than 5 %, or if
its speed-up is larger than bytes and operations allow: then a time or a ceiling is wrong. A batch that was not measured
or did not fit has not won.

**Prompts** (`with_prompts`): a decoder's verdict is about decode steps, but prefill multiplies many rows at a time. A
prompt length is faster or slower if the whole interval of its ratio lies on one side of 1, else open; of several
batches the slowest decides. Ten prompts a side are too few to judge p99.

**Advice among formats** (`advise`): each format has its own verdict. The best of the formats that win (at every batch,
or up to one) has the least mean step time over the traffic. Without traffic it is the one that wins at most batches,
and among equals the one with the largest mean gain.

    the subject is the best         its own verdict
    another format is the best      use that instead, up to the last batch at which it wins
    none wins, some are open        inconclusive
    none wins                       do not quantize here
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from quantkit.bundle import Check, PromptVerdict, Verdict
from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.stats.abba import P99_FROM
from quantkit.stats.evidence import SpeedUp

PREDICTED = "predicted"
_WORTH = 1.05
_NAMES = {"latency.decode_step": "a step", "latency.prefill": "a prefill", "latency.op": ""}
_REASONS = 3
# advice after an inconclusive verdict
AGAIN = "measure again with nothing else running, and for longer (`--seconds` of `quantkit measure` and `quantkit tax`)"

State = Literal["wins", "loses", "open", "missing"]


@dataclass(frozen=True)
class MeasuredFormat:
    """The measurements of one format on the target.

    Args:
        format: name of the format.
        rows: rows of its bundle in one runtime, against one baseline.
        checks: gates and reload checks.
    """

    format: str
    rows: Sequence[Row]
    checks: Sequence[Check] = ()


def verdict(
    subject: MeasuredFormat,
    batches: Iterable[int],
    *,
    others: Sequence[MeasuredFormat] = (),
    traffic: Mapping[int, float] | None = None,
) -> Verdict:
    """Judge a format; give up to three reasons, each a sentence on one row, and advice if inconclusive.

    The verdict is about `latency.decode_step` rows; without them `latency.prefill` (a model that does not decode); else
    `latency.op`: the sum over linears, or single shapes, which must all win. Rows flagged `predicted` are used only
    if nothing was measured: the verdict is then a forecast.

    Args:
        subject: the judged format.
        batches: batches that matter.
        others: other formats measured on this target; used only if a check of the subject failed.
        traffic: share of the steps by batch; if present, only its batches matter.

    Raises InputError: `not-measured` without a failed check and without a latency at any of the batches; `no-batches`;
    `traffic-invalid` for a share below zero, or none above.
    """
    wanted = _wanted(batches, traffic)
    failed = [check for check in subject.checks if not check.ok]
    if failed:
        return _instead(subject, failed, wanted, others)
    judged = _judged(subject.rows, wanted, traffic)
    if judged is None:
        value, rule = f"no latency at batch {listed(wanted)}", "a verdict needs measured rows"
        remedy = "run quantkit measure, or use batches that were measured"
        raise InputError("not-measured", where=subject.format, value=value, rule=rule, remedy=remedy)
    return judged


def state(row: Row) -> State:
    """Return the state of one latency row: it wins, loses, or is open."""
    speed = speed_up(row)
    if speed is None:
        return "missing"
    low, high = speed.interval
    if speed.open:
        return "open"
    if low > 1:
        tail = _p99(row)
        return "loses" if tail is not None and tail[2] < 1 and (row.n or 0) >= P99_FROM else "wins"
    return "open" if high > _WORTH else "loses"


def speed_up(row: Row) -> SpeedUp | None:
    """Return the speed-up of a latency row over its baseline; None if unknown."""
    against = row.baseline
    if row.value is None or against is None or against.ratio is None or against.ratio_ci95 is None:
        return None
    most = row.settings.get("promised_most")
    limit = float(most) if isinstance(most, int | float) and not isinstance(most, bool) else math.inf
    return SpeedUp(against.ratio, against.ratio_ci95, row.aa_spread or 0.0, limit, "noisy" in row.flags)


def _wanted(batches: Iterable[int], traffic: Mapping[int, float] | None) -> list[int]:
    if traffic is None:
        wanted = sorted(set(batches))
    else:
        if any(share < 0 or not math.isfinite(share) for share in traffic.values()) or not any(traffic.values()):
            raise InputError(
                "traffic-invalid",
                where="traffic",
                value=str(dict(traffic)),
                rule="shares are at least 0, and one is above 0",
            )
        wanted = sorted(batch for batch, share in traffic.items() if share > 0)
    if not wanted:
        raise InputError("no-batches", value="no batch", rule="a verdict needs at least one batch")
    return wanted


def _latencies(rows: Sequence[Row]) -> tuple[list[Row], bool]:
    """Return (rows for a verdict, True if they are predictions)."""
    for name in _NAMES:
        named = [row for row in rows if row.name == name]
        measured = [row for row in named if PREDICTED not in row.flags]
        if any(row.value is not None for row in measured):
            return measured, False
        if any(row.value is not None for row in named):
            return named, True
    return [], False


def _answer(states: Mapping[int, State], traffic: Mapping[int, float] | None) -> tuple[str, int | None]:
    wins = [one == "wins" for one in states.values()]
    count = sum(wins)
    if traffic is not None:
        open_, won = (sum(traffic[b] for b, one in states.items() if one == asked) for asked in ("open", "wins"))
        if open_ > won:
            return "inconclusive", None
    if count == len(wins):
        return "ship_it", None
    if count == 0:
        return ("inconclusive" if "open" in states.values() else "do_not_quantize"), None
    if all(wins[:count]):
        return "ship_up_to", list(states)[count - 1]
    # gaps between winning batches that only noise makes are inconclusive
    gaps = {one for one in states.values() if one != "wins"}
    return ("inconclusive" if gaps == {"open"} else "intervals"), None


def _judged(rows: Sequence[Row], wanted: Sequence[int], traffic: Mapping[int, float] | None) -> Verdict | None:
    timed, forecast = _latencies(rows)
    worst = {batch: _worst([row for row in timed if row.batch == batch]) for batch in wanted}
    states = {batch: state(row) if row else "missing" for batch, row in worst.items()}
    if set(states.values()) == {"missing"}:
        return None
    answer, limit = _answer(states, traffic)

    def order(row: Row) -> tuple[int, int]:
        shape = row.shape or {}
        return row.batch or 0, shape.get("context") or shape.get("new_tokens") or 0

    # reasons are chosen by importance and listed by batch
    deciding = sorted(_deciding(answer, limit, worst, states, timed), key=order)
    because = [sentence(row) for row in deciding]
    because[-1] += _few_steps(deciding)
    if answer == "intervals":
        because[0] = f"wins at batch {_ranges(states)}. {because[0]}"
    if traffic is not None and answer != "inconclusive" and (weighted := _over_traffic(timed, traffic)):
        because[0] = f"{weighted}. {because[0]}"
    if missing := [batch for batch, one in states.items() if one == "missing"]:
        why = sorted({flag for row in rows if row.batch in missing and row.value is None for flag in row.flags})
        reason = f" ({', '.join(why)})" if why else ""
        because[-1] = f"{because[-1]}. Not measured: batch {listed(missing)}{reason}"
    if answer == "inconclusive":
        because.append(AGAIN)
    if forecast:
        because.append("predicted, not measured: `quantkit measure` on the target would confirm it")
    return Verdict(answer=answer, batch=limit, because=because, forecast=forecast)


def _instead(
    subject: MeasuredFormat, failed: Sequence[Check], wanted: Sequence[int], others: Sequence[MeasuredFormat]
) -> Verdict:
    reasons = [
        f"{subject.format} failed {check.name}: {_figure(check.value)} against a limit of {_figure(check.limit)}"
        for check in failed
    ]
    passing = [other for other in others if all(check.ok for check in other.checks)]
    judged = [(other, _judged(other.rows, wanted, None)) for other in passing]
    winning = [
        (other.format, own)
        for other, own in judged
        if own is not None and own.answer in {"ship_it", "ship_up_to"} and not own.forecast
    ]
    if not winning:
        return Verdict(answer="do_not_quantize", because=reasons[:_REASONS])
    # the format that wins up to the largest batch; among equals, the first
    name, best = max(winning, key=lambda pair: pair[1].batch or math.inf)
    because = [reasons[0], *(f"{name}: {reason}" for reason in best.because)]
    return Verdict(answer="use_instead", batch=best.batch, format=name, because=because[:_REASONS])


def _worst(rows: Sequence[Row]) -> Row | None:
    """Return the deciding row of a batch: first a loss, then missing, open, a win; among equals, the lowest ratio."""
    order: tuple[State, ...] = ("loses", "missing", "open", "wins")
    return min(rows, key=lambda row: (order.index(state(row)), _ratios(row)[0]), default=None)


def _deciding(
    answer: str, limit: int | None, worst: Mapping[int, Row | None], states: Mapping[int, State], timed: Sequence[Row]
) -> list[Row]:
    """Return at most three rows: the decisive one first, then the ends of the range, then the closest calls."""
    batches = [batch for batch, row in worst.items() if row is not None and row.value is not None]
    by_low = sorted(batches, key=lambda batch: _ratios(worst[batch])[0])
    if answer == "ship_it":
        first = by_low[:1]
    elif answer == "ship_up_to":
        beyond = [batch for batch in batches if batch > (limit or 0)]
        first = [*(batch for batch in batches if batch == limit), *beyond[:1]]
    elif answer == "intervals":
        first = [b for a, b in pairwise(batches) if states[a] != states[b]]
    else:
        first = by_low[-1:]
    chosen = dict.fromkeys([*first, *batches[:1], *batches[-1:]])
    rows = [row for batch in chosen if (row := worst[batch]) is not None]
    near = sorted(
        (row for row in timed if row.batch in worst and row.value is not None and row.baseline and row not in rows),
        key=lambda row: abs(math.log(_ratios(row)[1])),
    )
    return [*rows, *near][:_REASONS]


def _ratios(row: Row | None) -> tuple[float, float, float]:
    """Return (low, ratio, high) of a row against its baseline; 0, 1 and infinity without one."""
    speed = None if row is None else speed_up(row)
    return (0.0, 1.0, math.inf) if speed is None else (speed.interval[0], speed.ratio, speed.interval[1])


def _p99(row: Row) -> tuple[float, float, float] | None:
    """Return (low, ratio, high) of the 99th percentiles, if present."""
    low, ratio, high = (row.settings.get(key) for key in ("p99_ratio_low", "p99_ratio", "p99_ratio_high"))
    if isinstance(low, int | float) and isinstance(ratio, int | float) and isinstance(high, int | float):
        return low, ratio, high
    return None


def sentence(row: Row) -> str:
    """Phrase a row: `batch 8, context 128: 11.3 ms a step against 30.1 ms, 2.66 times as fast (2.60 to 2.70)`.

    The interval is the one that decides; it includes the A/A spread.
    """
    speed = speed_up(row)
    assert speed is not None and row.baseline is not None
    low, high = speed.interval
    times = f"batch {row.batch}, {_what(row)} against {_time(row.baseline.value)}, {speed.ratio:.2f} times as fast"
    text = f"{times} ({low:.2f} to {high:.2f})"
    if speed.doubt == "ceiling":
        return f"{text}, but bytes and operations allow {speed.most:.2f} at most: a time or a ceiling is wrong"
    standing, tail = state(row), _p99(row)
    noise = f"two measurements of one side differ by {100 * speed.spread:.1f} %" if speed.doubt == "noise" else ""
    if speed.busy:
        return f"{text}, not decided: the machine was busy"
    if standing == "open":
        return f"{times}, not decided: with this machine's noise the interval is {low:.2f} to {high:.2f}"
    if low <= 1 < speed.ci95[0]:
        return f"{text}, the gain is within noise{f': {noise}' if noise else ''}"
    if low <= 1:
        return text
    if standing == "loses" and tail is not None:
        return f"{text}, but p99 is worse: {tail[1]:.2f} times as fast ({tail[0]:.2f} to {tail[2]:.2f})"
    if (row.n or 0) >= P99_FROM and tail is not None and tail[0] <= 1:
        return f"{text}; p99 not shown to differ ({tail[0]:.2f} to {tail[2]:.2f})"
    return text


def _few_steps(rows: Sequence[Row]) -> str:
    """Return `; p99 from 30 to 96 steps is not judged` for the rows that win by p50 from few steps, or ""."""
    few = sorted(row.n or 0 for row in rows if state(row) == "wins" and (row.n or 0) < P99_FROM)
    return f"; p99 from {few[0]}{f' to {few[-1]}' if few[0] != few[-1] else ''} steps is not judged" if few else ""


def _what(row: Row) -> str:
    """Describe a row: `context 128: 11.3 ms a step`, `4096x14336: 2.1 ms`."""
    shape, op = row.shape or {}, row.op
    time_ = _time(row.value or 0.0)
    if row.name == "latency.op" and op is not None:
        return f"{op.layer or f'{op.K}x{op.N}'}: {time_}"
    if row.name == "latency.prefill" and shape.get("new_tokens") == 1:  # a graph's input is a whole sample
        return f"{time_} a pass"
    sizes = f"context {shape['context']}" if shape.get("context") else f"{shape.get('new_tokens', 1)} tokens"
    return f"{sizes}: {time_} {_NAMES[row.name]}"


def _over_traffic(rows: Sequence[Row], traffic: Mapping[int, float]) -> str:
    """Describe the mean step time over the traffic, contexts weighted equally; "" if a batch was not measured."""
    times = over_traffic(rows, traffic)
    if times is None:
        return ""
    ours, theirs = times
    total = sum(traffic.values())
    unit = "" if rows[0].name == "latency.op" else f" {_NAMES[rows[0].name]}"
    what = f"{_time(ours / total)}{unit} against {_time(theirs / total)}"
    return f"over the traffic: {what}, {theirs / ours:.2f} times as fast"


def over_traffic(rows: Sequence[Row], traffic: Mapping[int, float]) -> tuple[float, float] | None:
    """Return mean seconds (of the subject, of the baseline), weighted by the traffic.

    None if a batch is missing or its speed-up is not credible.
    """
    ours = theirs = 0.0
    for batch, share in traffic.items():
        timed = [row for row in rows if row.batch == batch and row.value is not None and row.baseline is not None]
        if share and (not timed or any((speed := speed_up(row)) and speed.doubt for row in timed)):
            return None
        if share:
            ours += share * sum(row.value or 0.0 for row in timed) / len(timed)
            theirs += share * sum(row.baseline.value for row in timed if row.baseline) / len(timed)
    return ours, theirs


def _ranges(states: Mapping[int, State]) -> str:
    runs = [list(run) for wins, run in groupby(states, lambda batch: states[batch] == "wins") if wins]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def listed(batches: Sequence[int]) -> str:
    """Join batches: `1, 4, 16`."""
    return ", ".join(map(str, batches))


def _time(seconds: float) -> str:
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds * 1e3 >= 1 else ("µs", 1e6)
    return f"{_figure(seconds * factor)} {unit}"


def _figure(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


Standing = Literal["slower", "open", "faster"]
# the first of these decides a length that was measured at several batches
_GRAVEST: tuple[Standing, ...] = ("slower", "open", "faster")


def with_prompts(judged: Verdict, rows: Sequence[Row], *, setting: str = "") -> Verdict:
    """Extend a verdict on decode steps by its effect on prompts, and name an alternative where it gains nothing.

    Args:
        judged: verdict on decode steps.
        rows: rows of the verdict, prefills included.
        setting: recipe setting that makes prefill faster, such as `onnx.prefill=int8`; "" without one.
    """
    worst = _by_length(rows)
    by = {standing: [length for length, (_, state) in worst.items() if state == standing] for standing in _GRAVEST}
    prompts = PromptVerdict(faster=by["faster"], slower=by["slower"], open=by["open"]) if worst else None
    ends = list(dict.fromkeys([*list(worst)[:1], *list(worst)[-1:]]))
    because = [*judged.because, *(sentence(worst[length][0]) for length in ends)]
    steps = [row.batch or 0 for row in rows if row.name == "latency.decode_step" and row.value]
    slower = judged.answer == "ship_up_to" and max(steps, default=math.inf) > (judged.batch or 0)
    lost = [f"batches above {judged.batch}"] if slower else []
    lost += ["the other batches"] if judged.answer == "intervals" else []
    lost += [f"prompts of {listed(by['slower'])} tokens"] if by["slower"] else []
    if not lost:
        return judged.model_copy(update={"prompts": prompts, "because": because})
    other = f"compile with `--set {setting}`, or use " if setting and by["slower"] else "use "
    instead = f"for {' and '.join(lost)}: {other}the float model (`--recipe float`)"
    return judged.model_copy(update={"prompts": prompts, "instead": instead, "because": [*because, instead]})


def _by_length(rows: Sequence[Row]) -> dict[int, tuple[Row, Standing]]:
    """Return the deciding row of each prompt length, ascending."""
    by_length: dict[int, tuple[Row, Standing]] = {}
    for row in rows:
        if row.name != "latency.prefill" or (speed := speed_up(row)) is None:
            continue
        low, high = speed.interval
        believed = not speed.open
        state: Standing = "faster" if low > 1 and believed else "slower" if high < 1 and believed else "open"
        length = (row.shape or {}).get("new_tokens", 0)
        if length not in by_length or _GRAVEST.index(state) < _GRAVEST.index(by_length[length][1]):
            by_length[length] = row, state
    return dict(sorted(by_length.items()))


_WINNING = ("ship_it", "ship_up_to")


def verdicts(
    measured: Sequence[MeasuredFormat], batches: Iterable[int], traffic: Mapping[int, float] | None = None
) -> list[Verdict]:
    """Judge each format; the verdict is `not_measured` without a timed batch."""
    wanted = sorted(set(batches))
    judged = []
    for one in measured:
        try:
            own = verdict(one, wanted, traffic=traffic)
        except InputError as error:
            if error.code != "not-measured":
                raise
            flags = ", ".join(sorted({flag for row in one.rows for flag in row.flags if row.value is None}))
            reason = f"nothing was timed: {flags}" if flags else "nothing was timed"
            own = Verdict(answer="not_measured", because=[reason])
        judged.append(own.model_copy(update={"format": one.format}))
    return judged


def advise(
    measured: Sequence[MeasuredFormat],
    batches: Iterable[int],
    *,
    traffic: Mapping[int, float] | None = None,
    subject: str = "",
) -> Verdict:
    """Advise on the format to ship, with up to three reasons.

    Args:
        measured: formats, all measured against one baseline.
        batches: batches that matter, without traffic.
        traffic: share of the steps by batch.
        subject: format that the advice is about; "" for the best one.

    Returns:
        the advice; its `format` is the one to ship, or to use instead.

    Raises InputError: `no-batches`, `traffic-invalid`; `not-measured` without any format.
    """
    wanted = sorted(set(batches))
    judged = verdicts(measured, wanted, traffic)
    if not judged:
        raise InputError("not-measured", where="--format", value="no format", rule="advice compares formats")
    winning = [
        (own, one) for own, one in zip(judged, measured, strict=True) if own.answer in _WINNING and not own.forecast
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
    for answer in ("intervals", "inconclusive"):
        matching = [own for own in judged if own.answer == answer]
        if matching:
            return next((own for own in matching if own.format == subject), matching[0])
    because = [f"{own.format}: {reason}" for own in judged for reason in own.because[:1]]
    about = subject or (judged[0].format if len(judged) == 1 else None)
    return Verdict(answer="do_not_quantize", format=about, because=because[:_REASONS])


def _gain(one: MeasuredFormat, wanted: Sequence[int], traffic: Mapping[int, float] | None) -> tuple[float, float]:
    """Return the sort key of a format, larger is better."""
    if traffic is not None:
        times = over_traffic(one.rows, traffic)
        return (1.0, times[1] / times[0]) if times else (0.0, 0.0)
    rows = [row for row in one.rows if row.batch in wanted and row.baseline is not None and row.baseline.ratio]
    rows = [row for row in rows if (speed := speed_up(row)) is not None and not speed.doubt]
    wins = sum(state(row) == "wins" for row in rows) / (len(rows) or 1)
    logs = [math.log(row.baseline.ratio) for row in rows if row.baseline is not None and row.baseline.ratio]
    return wins, sum(logs) / (len(logs) or 1)
