"""Judge one bundle as the draft of another: acceptance on text, and the expected gain at the times of both.

Times are those that both bundles recorded of decode steps on one device in one runtime; the target's pass of k tokens
is taken from its steps at larger batches, which read the weights once too. Without such rows the plan forecasts both on
the target machine of the target's bundle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.accuracy.drafts import Acceptance, Drafted, DraftTimes, acceptance, gains
from quantkit.measurement.rows import Row
from quantkit.model.source import pretrained
from quantkit.model.structure.kinds import positions
from quantkit.pipeline.plan import planned_steps
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import target_of
from quantkit.planning.roofline import ModelStep
from quantkit.runtimes.generate import demand_alone, demand_decoder
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.target import Target

TEXT = "prose-en"
# prompts of the text, tokens of each, and most drafted tokens
_PROMPTS, _TOKENS, MOST = 16, 128, 8
_CONTEXT = 128


def judge_draft(
    draft: Bundle | str | Path,
    target: Bundle | str | Path,
    progress: Progress | None = None,
    *,
    calibration: str | None = None,
) -> Drafted:
    """Measure the acceptance of a draft bundle's tokens by a target bundle, and forecast the gain.

    Args:
        calibration: another text, by name or path; its `eval` split is read.

    Raises:
        InputError: those of `Bundle.load`; `not-a-decoder`, `bundle-without-checkpoint`, `architecture-unsupported`
            for a decoder beside an encoder, `hash-mismatch`, `vocabulary-differs`; those of `load_tokens`.
        MissingDependency: torch.
    """
    bundles = [Bundle.load(side.path if isinstance(side, Bundle) else side) for side in (draft, target)]
    for bundle in bundles:
        demand_decoder(bundle)
        TORCH.folder(bundle)
        demand_alone(bundle, "its encoder would read the text that a draft has to predict")
    with MissingDependency.unless_found("torch", extra="compile", purpose="reading both models"):
        import torch  # noqa: F401
    from quantkit.measurement.accuracy.score import at_a_time

    progress = progress or Progress()
    progress.plan({"verify": 1.0, "score": 20.0})
    _demand_one_vocabulary(*(TORCH.folder(bundle) for bundle in bundles))
    progress.at("verify", 0.0, "hashes")
    folders = [TORCH.checked(bundle) for bundle in bundles]
    text = _text(folders, calibration or TEXT)
    proposing, reading = (TORCH.stream(folder) for folder in folders)
    progress.at("score", 0.0, "the target")
    theirs = reading.scores(text.ids)
    progress.at("score", 0.4, "the draft")
    ours = proposing.scores(text.ids)
    few = min(at_a_time(reading), at_a_time(proposing))
    seen = acceptance(theirs, ours, text.ids, few, lambda done: progress.at("score", 0.7 + 0.3 * done))
    data = f"{text.items:,} positions of {text.name} ({text.split}), {len(text.ids)} prompts"
    return concluded(bundles[0], bundles[1], seen, data)


def concluded(draft: Bundle, target: Bundle, seen: Acceptance, data: str) -> Drafted:
    """Add times and gains to an acceptance."""
    notes = ["the acceptance is that of given text; text that the target writes is often easier to guess"]
    times, why = measured(draft, target)
    if times is None:
        times, other = forecast(draft, target)
        notes.append(f"{why}; {other}")
    else:
        notes += [why] if why else []
    named = [{"name": str(one.path), "content_sha256": one.manifest.content_sha256} for one in (draft, target)]
    listed = gains(seen, times, MOST) if times is not None else []
    return Drafted(named[0], named[1], data, seen, times, listed, notes)


def measured(draft: Bundle, target: Bundle) -> tuple[DraftTimes | None, str]:
    """Return the recorded times of both at one place, with a note; or None and the reason."""
    ours, theirs = _steps(draft), _steps(target)
    shared = [place for place in theirs if place in ours and 1 in theirs[place] and 1 in ours[place]]
    if not shared:
        return None, "no decode step of both was timed on one device in one runtime"
    place = max(shared, key=lambda place: (len(theirs[place]), -int(place[2] or 0)))
    known, (runtime, _, context) = theirs[place], place
    device = next(row.device.name for row in _timed(target) if row.device is not None and _place(row) == place)
    passes = {tokens: _between(known, tokens) for tokens in range(1, MOST + 2)}
    note = "" if max(known) > MOST else f"steps of the target were timed up to batch {max(known)}; "
    note += "a longer pass is taken to last as long" if note else ""
    about = f"decode steps in {runtime} on {device}, context {context or 0}"
    return DraftTimes(ours[place][1], known[1], passes, "measured", about), note


def forecast(draft: Bundle, target: Bundle, aimed: Target | None = None) -> tuple[DraftTimes | None, str]:
    """Return the plan's times of both on a machine, that of the target's bundle if None; or None and the reason."""
    aimed = aimed or target_of(target.manifest)
    steps = [ModelStep(1, tokens, _CONTEXT) for tokens in range(1, MOST + 2)]
    try:
        theirs, runtime = planned_steps(target, aimed, steps)
        ours, _ = planned_steps(draft, aimed, steps[:1])
    except InputError as problem:
        return None, f"no times: {problem.value}"
    planned = [one for one in (*ours, *theirs) if one is not None and one.seconds is not None]
    if len(planned) < 1 + len(steps):
        return None, f"no times: the plan has none for {aimed.name} (`quantkit doctor --write` measures this machine)"
    step, *seconds = (float(one.seconds or 0) for one in planned)
    # of a pass the forecast may be that of a prompt, which has another basis than a step's
    passes = {tokens: max(seconds[0], one) for tokens, one in enumerate(seconds, start=1)}
    about = f"the plan for {aimed.name} in {runtime}, context {_CONTEXT}"
    if all(one.forecast is not None for one in planned):
        return DraftTimes(step, seconds[0], passes, "forecast", about), "the plan's times are used"
    note = "the plan's times are used: bounds by bytes and operations, which no run has confirmed"
    return DraftTimes(step, seconds[0], passes, "bound", about), note


def _steps(bundle: Bundle) -> dict[tuple[Any, ...], dict[int, float]]:
    """Map runtime, device and context to the seconds of a decode step by batch."""
    steps: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in _timed(bundle):
        steps.setdefault(_place(row), {})[int(row.batch or 1)] = float(row.value or 0)
    return steps


def _timed(bundle: Bundle) -> list[Row]:
    rows, own = map(Row.model_validate, bundle.measurements), bundle.manifest.content_sha256
    return [row for row in rows if row.name == "latency.decode_step" and row.subject == own and row.value and row.batch]


def _place(row: Row) -> tuple[Any, ...]:
    return row.runtime, row.device.id if row.device else None, (row.shape or {}).get("context")


def _between(known: dict[int, float], tokens: int) -> float:
    """Interpolate the seconds of a pass between batches; beyond the largest it stays."""
    below = max(batch for batch in known if batch <= tokens)
    above = min((batch for batch in known if batch >= tokens), default=below)
    if above == below:
        return known[below]
    share = (tokens - below) / (above - below)
    return known[below] * (1 - share) + known[above] * share


def _demand_one_vocabulary(draft: Path, target: Path) -> None:
    """Refuse two checkpoints with different ids for a token. Raises InputError `vocabulary-differs`."""
    mine, other = (pretrained.tokenizer(folder).get_vocab() for folder in (draft, target))
    if mine == other:
        return
    differ = sum(mine.get(token) != place for token, place in other.items()) + len(mine.keys() - other.keys())
    value = f"{differ:,} tokens differ between {len(mine):,} and {len(other):,}"
    rule, remedy = "a draft proposes the target's own tokens", "a smaller model of the same family"
    raise InputError("vocabulary-differs", f"{draft.parent} for {target.parent}", value, rule, remedy)


def _text(folders: Sequence[Path], reference: str) -> Any:
    from quantkit.calibrate.tokens.ids import load_tokens

    configs = [json.loads(limits.read(folder / "config.json")) for folder in folders]
    most = min(_TOKENS, *(positions(config) or _TOKENS for config in configs))
    size = min(int(config.get("vocab_size") or 1 << 31) for config in configs)
    tokenizer = pretrained.tokenizer(folders[1])
    how: dict[str, Any] = {"samples": _PROMPTS * _TOKENS // most, "tokens": most, "seed": 0}
    return load_tokens(reference, "eval", tokenizer=tokenizer, vocab_size=size, special="before", **how)
