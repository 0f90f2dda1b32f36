"""Compare two bundles of one model, or a bundle and its float model: by token, by batch, by size, by layer.

All differences are decided together (`stats.decision`) from the rows and items that both bundles hold; only `measure`
runs a model. Flipped next words are shown with their text. For that the scored tokens are read again and recognised by
their hash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.calibrate.tokens.ids import load_tokens
from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.accuracy.positions import Items, against, common, flipped
from quantkit.measurement.compared import (
    Compared,
    DecidedCell,
    NamedSide,
    Quantity,
    WordFlip,
    WordFlips,
    decided,
    exit_code,
    layer_pairs,
    verdict,
)
from quantkit.measurement.load import beside
from quantkit.measurement.rows import Data, Row
from quantkit.model.source import pretrained
from quantkit.pipeline import sides as timing_of
from quantkit.pipeline import tasks
from quantkit.pipeline.gates import allowed
from quantkit.pipeline.measure import QUICK, config_of, default_runtime
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.sides import (
    BundleSide,
    BundleTiming,
    RoundsTimer,
    common_runtime,
    demand_one_text,
    open_sides,
)
from quantkit.pipeline.verdict import read_harm
from quantkit.recipe import Gates
from quantkit.runtimes import load_runtime
from quantkit.runtimes.text import Tokenizer
from quantkit.stats.decision import CellDecision, confirm
from quantkit.stats.evidence import KNOWN, MeasuredValue, difference
from quantkit.stats.shares import mcnemar

Array = NDArray[Any]
Decode = Callable[[Sequence[int]], str]

# flipped words of each kind that are shown, and tokens before each
EXAMPLES, _BEFORE = 5, 16
# a difference in accuracy, or in time, of less is called none
ACCURACY, LATENCY = 0.01, 0.05
_NEXT_WORD, _KL, _PERPLEXITY = "accuracy.next_word", "accuracy.kl", "accuracy.perplexity"
# of models that have no next word, what counts, as far as it was scored; others say the same again
_LABELLED = (
    *("accuracy.top1", "accuracy.recall_at_1", "accuracy.top1_agreement", "accuracy.same"),
    *("accuracy.cosine", "accuracy.relative_error", _KL),
)


@dataclass(frozen=True)
class Text:
    """Scored ids `[samples, tokens]`, None where they are not at hand, and a function that decodes them to text;
    without the tokenizer, to numbers."""

    ids: Array | None
    decode: Decode


def flips(a: Items, b: Items, text: Text, count: int) -> WordFlips:
    """Find flipped positions, with `count` examples of each kind: those with the largest change in the next token's
    chance.
    """
    test = mcnemar(a.right_candidate, b.right_candidate, b.clusters()[0])
    rise = b.nll_candidate - a.nll_candidate
    moved = flipped(a, b)
    lost, gained = (moved[a.right_candidate[moved] == side] for side in (True, False))
    shown = [
        *lost[np.argsort(-rise[lost], kind="stable")][:count],
        *gained[np.argsort(rise[gained], kind="stable")][:count],
    ]
    return WordFlips(
        lost=test.only_first,
        gained=test.only_second,
        n=a.n,
        p=test.p,
        agree=float(np.mean(a.best_candidate == b.best_candidate)),
        examples=[_flip(a, b, text, int(item), float(rise[item])) for item in shown],
    )


def _flip(a: Items, b: Items, text: Text, item: int, rise: float) -> WordFlip:
    sequence = int(a.sequence[item])
    position = item - int(np.argmax(a.sequence == sequence))
    right: Literal["A", "B"] = "A" if a.right_candidate[item] else "B"
    before = follows = None
    if text.ids is not None:
        row = text.ids[sequence].tolist()
        before = text.decode(row[max(0, position + 1 - _BEFORE) : position + 1])
        follows = text.decode([row[position + 1]])
    return WordFlip(
        sequence=sequence,
        position=position,
        right=right,
        rise=rise,
        before=before,
        follows=follows,
        a=text.decode([int(a.best_candidate[item])]),
        a_chance=float(a.chance_candidate[item]),
        b=text.decode([int(b.best_candidate[item])]),
        b_chance=float(b.chance_candidate[item]),
    )


def scored_text(side: BundleSide, items: Items, data: Data, calibration: str | None) -> tuple[Text, list[str]]:
    """Read the scored text again; return it with a note for readers if it is not at hand.

    Args:
        items: number and length of the sequences.
        data: name and hash of the text.
        calibration: path of the set; None for the name in the rows.

    Raises InputError: with a `calibration`, `items-differ` and those of `load_tokens`.
    """

    def without(why: str) -> list[str]:
        return [f"flipped words are shown without their text ({why}); it is {data.set}, and --calibration says where"]

    folders = (side.bundle.path / place for place in ("model", "onnx"))
    folder = next((folder for folder in folders if (folder / "tokenizer_config.json").is_file()), None)
    decode: Decode = _numbers
    if folder is None:
        return Text(None, decode), ["flipped words are shown as numbers: the bundle has no tokenizer"]
    missing = next((package for package in ("torch", "transformers") if not machine.has(package)), None)
    if missing is not None:
        with suppress(QuantkitError):
            decode = Tokenizer(folder).decode
        return Text(None, decode), without(f"{missing} is not installed")
    try:
        tokenizer = _loaded(folder)
        decode = functools.partial(_decoded, tokenizer)
        return Text(_ids(side, tokenizer, items, data, calibration or data.set), decode), []
    except InputError as problem:
        if calibration is not None:
            raise
        return Text(None, decode), without(problem.line())


def _ids(side: BundleSide, tokenizer: Any, items: Items, data: Data, reference: str) -> Array:
    """Read the scored token ids again, [samples, tokens]. Raises InputError `items-differ`; those of `load_tokens`."""
    samples = int(np.unique(items.sequence).size)
    chosen = side.manifest.recipe.get("calibration") or {}
    size = config_of(side.bundle).get("vocab_size")
    loaded = load_tokens(
        reference,
        data.split,
        tokenizer=tokenizer,
        samples=samples,
        tokens=items.n // samples + 1,
        seed=side.manifest.seed,
        vocab_size=size if isinstance(size, int) else 1 << 31,
        # rows that do not say what their sequences begin with may be older than BOS in them
        special="none" if data.begins is None else "before",
        template=chosen.get("template"),
    )
    if loaded.sha256 != data.sha256:
        value, rule = (
            f"its tokens have the hash {loaded.sha256[:12]}",
            f"the scored ones have {data.sha256[:12]}",
        )
        raise InputError("items-differ", where=reference, value=value, rule=rule)
    ids: Array = loaded.ids.numpy()
    return ids


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(f"#{token}" for token in ids)


def _loaded(folder: Path) -> Any:
    """Load the tokenizer as transformers has it, with which the text was tokenized. Raises `tokenizer-damaged`."""
    try:
        return pretrained.tokenizer(folder)
    except InputError:
        raise
    except Exception as problem:  # whatever a damaged file makes the library raise
        message = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise InputError("tokenizer-damaged", where=str(folder), value=message) from problem


@dataclass(frozen=True)
class Margins:
    """Smallest differences that count.

    Attributes:
        accuracy: 0.01 is one item in a hundred, 0.01 nats of KL, 1 % of perplexity, or 0.01 of a cosine. None takes
            these, and allows a larger loss where the gates of B's recipe allow it.
        latency: 0.05 is 5 % slower; two runs of the same model are rarely closer. None takes this, and allows steps
            slower than the float model's where B's own verdict ships it.
        size: 0.01 is 1 % larger.
    """

    accuracy: float | None = None
    latency: float | None = None
    size: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values outside the range of a margin."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                rule = "a margin is above zero, because equality cannot be shown"
                raise InputError("margin-invalid", where=f"--{name}-margin", value=value, rule=rule)


def compare_bundles(
    a: Bundle | str | Path,
    b: Bundle | str | Path,
    progress: Progress | None = None,
    *,
    margins: Margins | None = None,
    runtime: str | None = None,
    calibration: str | None = None,
    measure: bool = False,
    batches: Sequence[int] | None = None,
    seconds: float | None = None,
    speed: bool = True,
    examples: int = EXAMPLES,
    timer: RoundsTimer | None = None,
) -> Compared:
    """Compare B with A.

    Args:
        runtime: whose scores are compared, and in which that run times both, where they can be timed in it.
        batches: of that run; None is those of `measure --quick`.
        seconds: for all of that run.
        examples: flipped words of each kind that are shown.
        timer: takes the times of that run; None: this machine.

    Raises InputError: `usage`, `unknown-runtime`, `models-differ`, `items-differ`, `items-missing`, `hash-mismatch`,
    `values-invalid`, and those of `open_sides` and `sides.prepare`; MissingDependency: scipy; onnxruntime, to time.
    """
    from quantkit.report.compared import because

    progress, margins = progress or Progress(), margins or Margins()
    _demand_sense(measure, speed, runtime, {"--batch": batches, "--seconds": seconds})
    progress.plan({"verify": 2.0, **({"speed": 60.0 + (seconds or QUICK.seconds)} if measure and speed else {})})
    progress.at("verify", 0.0, "hashes")
    sides = open_sides(a, b)
    first, second = sides
    model, timing, notes = first.manifest.model, None, list[str]()
    if measure and speed:
        how: dict[str, Any] = {"batches": batches, "seconds": seconds, "calibration": calibration, "runtime": runtime}
        timing, notes = timing_of.prepare(first, second, **how, here=timer is None)
        timing = replace(timing, timer=timer) if timer is not None else timing
    scored = _scored(first, second, margins.accuracy or ACCURACY, runtime, calibration, examples)
    latency = margins.latency or LATENCY
    timed, untimed = _timed(first, second, latency, timing, progress) if speed else ([], [])
    asked = [*scored.asked, *timed, *_sized(first, second, scored.runtimes, margins.size)]
    decisions = decided(asked)
    again = _again(asked, decisions, latency, timing, progress) if timing else {}
    limits = _limits(second, asked) if margins.accuracy is None else {}
    cells = []
    for i, (quantity, decision) in enumerate(zip(asked, decisions, strict=True)):
        shipped = _shipped(first, second, quantity) if margins.latency is None and quantity.what == "latency" else ""
        cells.append(DecidedCell.of(*again.get(i, (quantity, decision)), allowed=limits.get(i), shipped=shipped))
    same = "A and B hold the same content, byte for byte: what differs is noise"
    identical = [same] if first.subject == second.subject else []
    layers = [[] if side.floating else side.manifest.layers for side in sides]
    harms = [None if side.floating else read_harm(side.bundle.path) for side in sides]
    errors = [{} if harm is None else {layer.name: layer.error for layer in harm.layers} for harm in harms]
    return Compared(
        model=model.name,
        kind=model.kind,
        a=_named(first, scored.runtimes[0]),
        b=_named(second, scored.runtimes[1]),
        verdict=verdict(cells),
        exit=exit_code(cells),
        because=because(cells, model.kind),
        cells=cells,
        data=scored.data,
        flips=scored.flips,
        layers=layer_pairs(layers[0], layers[1], (errors[0], errors[1])),
        notes=[*identical, *scored.notes, *notes, *untimed],
        load=() if first.floating or second.floating else beside(first.rows, second.rows, first.subject),
        tasks=tasks.beside(first, second),
    )


def _demand_sense(measure: bool, speed: bool, runtime: str | None, timing: Mapping[str, object]) -> None:
    """Refuse options without effect."""
    if measure and not speed:
        remedy = "leave one out"
        raise InputError("usage", where="--measure", value="with --no-speed", rule="it times both", remedy=remedy)
    for option, value in timing.items():
        if value is not None and not measure:
            rule = "recorded times are compared at every batch that both have"
            raise InputError("usage", where=option, value="without --measure", rule=rule, remedy="add --measure")
    if runtime is not None:
        load_runtime(runtime, where="--runtime")


@dataclass(frozen=True)
class _Scored:
    asked: Sequence[Quantity]
    data: str
    runtimes: tuple[str, str]
    flips: WordFlips | None
    notes: Sequence[str]


def _scored(
    a: BundleSide, b: BundleSide, margin: float, runtime: str | None, calibration: str | None, examples: int
) -> _Scored:
    if a.manifest.model.kind != "decoder":
        asked, data, notes = by_row(a, b, margin, runtime)
        ran = runtime or next((quantity.runtime for quantity in asked if quantity.runtime), default_runtime(a.bundle))
        return _Scored(asked, f"{data.items:,} items of {data.set} ({data.split})", (ran, ran), None, notes)
    first, second, notes = common_runtime(a, b, runtime)
    read, known = (a.read(first), b.read(second)), (a.data(first), b.data(second))
    before, after = read
    if known[0] is not None and known[1] is not None and known[0].sha256 != known[1].sha256:
        # a compile scores the first sequences of what `measure` scores
        before, after = common(*read)
        known = (known[1],) * 2 if before is not read[0] else (known[0],) * 2 if after is not read[1] else known
    data = demand_one_text(a, b, *known)
    asked = by_item(before, after, margin, second, f"{a.name} and {b.name}")
    text, missing = scored_text(a, before, data, calibration) if examples else (None, [])
    words = None if text is None else flips(before, after, text, examples)
    about = f"{data.items:,} positions of {data.set} ({data.split})"
    return _Scored(asked, about, (first, second), words, [*notes, *missing])


def by_item(a: Items, b: Items, margin: float, runtime: str, where: str) -> list[Quantity]:
    """Compare next words, KL and log-perplexity, position by position.

    Raises InputError: `items-differ`, `values-invalid`, `nothing-scored`.
    """
    evidences = against(a, b, dict.fromkeys((_NEXT_WORD, _KL, _PERPLEXITY), margin), where=where)
    values: Mapping[str, tuple[Any, Any, str]] = {
        _NEXT_WORD: (a.right_candidate, b.right_candidate, "1"),
        _KL: (a.kl, b.kl, "nat"),
        _PERPLEXITY: (a.nll_candidate, b.nll_candidate, "1"),
    }
    asked = []
    for name, evidence in evidences.items():
        before, after, unit = values[name]
        means = [float(np.mean(side)) for side in (before, after)]
        if name == _PERPLEXITY:
            means = [float(np.exp(min(mean, 700.0))) for mean in means]
        asked.append(Quantity("accuracy", name, means[0], means[1], unit, "paired", evidence, n=a.n, runtime=runtime))
    return asked


def by_row(a: BundleSide, b: BundleSide, margin: float, asked: str | None) -> tuple[list[Quantity], Data, list[str]]:
    """Compare models without next words by rows: labels, pairs, cosines, each side by its own interval.

    Raises InputError: `items-missing`, nothing that both were scored by; `items-differ`.
    """
    ours, theirs = (
        {
            (row.name, row.runtime, row.settings.get("output")): row
            for row in side.accuracy(asked)
            if row.name in _LABELLED
        }
        for side in (a, b)
    )
    # a relative error of an output that has a cosine says the same
    shared = [
        place
        for place in ours
        if place in theirs and not (place[0] == "accuracy.relative_error" and ("accuracy.cosine", *place[1:]) in ours)
    ]
    if not shared:
        side, options = b if ours else a, [f"--runtime {asked}"] if asked else []
        value, rule = "no score that both have in one runtime", "both sides were scored"
        remedy = side.measure("--no-speed", *options)
        raise InputError("items-missing", where=str(side.bundle.path), value=value, rule=rule, remedy=remedy)
    data = demand_one_text(a, b, ours[shared[0]].data, theirs[shared[0]].data)
    quantities, without = [], []
    for place in sorted(shared, key=lambda place: _LABELLED.index(place[0])):
        one, other = ours[place], theirs[place]
        first, second = _measured(one, floating=a.floating), _measured(other, floating=b.floating)
        if first is None or second is None:
            without.append(one.name)
            continue
        evidence = difference(second, first, margin=margin, lower_is_better=one.better != "higher")
        shown = [_value(row, floating=side.floating) for row, side in ((one, a), (other, b))]
        output = None if place[2] is None else str(place[2])
        quantities.append(
            Quantity(
                *("accuracy", one.name, shown[0], shown[1], one.unit, "apart", evidence),
                n=one.n,
                runtime=one.runtime,
                output=output,
            )
        )
    notes = [
        "no items are kept of this kind of model: each side is known by its own interval, which is wider than a pair's"
    ]
    if without:
        notes.append(f"not decided, for want of an interval: {', '.join(sorted(set(without)))}")
    return quantities, data, notes


def _measured(row: Row, *, floating: bool) -> MeasuredValue | None:
    """Return a row's value with its interval; of shares of the same items, against the original: those are pairs
    already."""
    base = row.baseline
    if base is not None and base.difference is not None and base.difference_ci95 is not None:
        return MeasuredValue(0.0, (0.0, 0.0)) if floating else MeasuredValue(base.difference, base.difference_ci95)
    if floating:
        return None if base is None else MeasuredValue(base.value, (base.value, base.value))
    if row.value is None or row.ci95 is None:
        return None
    return MeasuredValue(row.value, (min(row.ci95[0], row.value), max(row.ci95[1], row.value)))


def _value(row: Row, *, floating: bool) -> float | None:
    return (row.baseline.value if row.baseline else None) if floating else row.value


def _timed(
    a: BundleSide, b: BundleSide, margin: float, timing: BundleTiming | None, progress: Progress
) -> tuple[list[Quantity], list[str]]:
    if timing is not None:
        return timing_of.of_run(timing.run(progress), margin, timing.runtime, timing.timer.device)
    quantities, notes = timing_of.recorded(a, b, margin)
    if not quantities:
        both = " and ".join(dict.fromkeys(side.measure() for side in (a, b)))
        notes = [f"speed is not compared: no batch was timed of both, on one device, against one baseline ({both})"]
    return quantities, notes


def _again(
    asked: Sequence[Quantity],
    decisions: Sequence[CellDecision],
    margin: float,
    timing: BundleTiming,
    progress: Progress,
) -> dict[int, tuple[Quantity, CellDecision, bool]]:
    """Time shapes called worse or better once more: no such call rests on one run."""
    called = {
        timing_of.key(quantity): i
        for i, (quantity, decision) in enumerate(zip(asked, decisions, strict=True))
        if quantity.what == "latency" and decision.answer in ("worse", "better")
    }
    if not called:
        return {}
    progress.note("what was called faster or slower is timed once more")
    places = [(asked[i].name, asked[i].batch, asked[i].shape) for i in called.values()]
    shapes = [shape for shape in timing.job.shapes if (shape.name, shape.batch, shape.sizes) in places]
    second, _ = timing_of.of_run(timing.run(progress, shapes), margin, timing.runtime, timing.timer.device)
    confirmed = {}
    for quantity, decision in zip(second, decided(second), strict=True):
        i = called[timing_of.key(quantity)]
        confirmed[i] = (quantity, confirm(decisions[i], decision), decision.answer == decisions[i].answer)
    return confirmed


def _sized(a: BundleSide, b: BundleSide, runtimes: tuple[str, str], margin: float) -> list[Quantity]:
    """Count the bytes loaded by each side's runtime; they have no uncertainty."""
    one, other = a.size(runtimes[0])[0], b.size(runtimes[1])[0]
    if not one or not other:
        return []
    larger = log(other / one)
    known = MeasuredValue(larger, (larger, larger))
    evidence = difference(known, KNOWN, margin=margin, alarm=margin, logarithm=True)
    return [Quantity("size", "size.bytes", one, other, "B", "counted", evidence, runtime=runtimes[1])]


def _limits(side: BundleSide, asked: Sequence[Quantity]) -> dict[int, float]:
    """Return how much worse in accuracy the gates of a bundle's recipe allow it to be; none where none is about it.

    Where one is, what no gate follows for is told and not judged: as the compile has it.
    """
    if side.floating:
        return {}
    gates = Gates.model_validate(side.manifest.recipe.get("gates") or {})
    known = {i: allowed(gates, one.name, one.a) for i, one in enumerate(asked) if one.what == "accuracy"}
    if all(limit is None for limit in known.values()):
        return {}
    return {i: inf if limit is None else limit for i, limit in known.items()}


def _shipped(a: BundleSide, b: BundleSide, asked: Quantity) -> str:
    """Explain why a time above the float model's is no failure: B's verdict ships it."""
    verdict = None if b.floating or not a.floating else b.manifest.verdict
    if verdict is None or verdict.answer not in ("ship_it", "ship_up_to"):
        return ""
    if asked.name == "latency.prefill" and b.manifest.model.kind == "decoder":
        return "its verdict rests on decode steps"
    if verdict.batch is not None and (asked.batch or 0) > verdict.batch:
        return f"its verdict ships it up to batch {verdict.batch}"
    return ""


def _named(side: BundleSide, runtime: str) -> NamedSide:
    size, bits = side.size(runtime)
    recipe = "float" if side.floating else str(side.manifest.recipe.get("name", ""))
    return NamedSide(side.name, side.subject, recipe, size, bits, None if side.floating else runtime)
