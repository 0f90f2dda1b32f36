"""Two bundles of one model, or a bundle and its float model: which is better, by token, by batch, by size, by layer.

Everything that was measured is decided together (`stats.decision`), on what both bundles already hold; only `measure`
runs anything. Next words that flipped are shown with their text: the scored tokens are read again, and known by hash.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
from quantkit.measurement.accuracy.positions import Items, flipped
from quantkit.measurement.compared import (
    Compared,
    DecidedCell,
    LayerPair,
    NamedSide,
    Quantity,
    WordFlip,
    WordFlips,
    decided,
    exit_code,
    layer_pairs,
    verdict,
)
from quantkit.measurement.rows import Data
from quantkit.model.source import pretrained
from quantkit.pipeline import sides
from quantkit.pipeline.gates import allowed
from quantkit.pipeline.measure import QUICK, config_of, default_runtime
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.sides import (
    BundleSide,
    BundleTiming,
    RoundsTimer,
    by_item,
    by_row,
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

# tokens before each that are shown
_BEFORE = 16


@dataclass(frozen=True)
class Text:
    """What was scored.

    Args:
        ids: `[samples, tokens]`; None where the text is not at hand.
        decode: ids as text; as numbers, where the tokenizer is not at hand.
    """

    ids: Array | None
    decode: Decode


def flips(a: Items, b: Items, text: Text, count: int) -> WordFlips:
    """What flipped, with `count` examples of each kind: where the chance of what follows has changed most."""
    test = mcnemar(a.right_candidate, b.right_candidate, b.clusters()[0])
    rise = b.nll_candidate - a.nll_candidate
    moved = flipped(a, b)
    lost, gained = (moved[a.right_candidate[moved] == side] for side in (True, False))
    shown = [
        *lost[np.argsort(-rise[lost], kind="stable")][:count],
        *gained[np.argsort(rise[gained], kind="stable")][:count],
    ]
    starts = (
        {int(label): int(np.argmax(a.sequence == label)) for label in np.unique(a.sequence[shown])} if shown else {}
    )
    return WordFlips(
        lost=test.only_first,
        gained=test.only_second,
        n=a.n,
        p=test.p,
        agree=float(np.mean(a.best_candidate == b.best_candidate)),
        examples=[_flip(a, b, text, int(item), float(rise[item]), starts) for item in shown],
    )


def scored_text(side: BundleSide, items: Items, data: Data, calibration: str | None) -> tuple[Text, list[str]]:
    """The text that was scored, and what a reader must know where it is not at hand.

    Args:
        items: how many sequences there are, and how long.
        data: its name and hash.
        calibration: where it is; None is the name that the rows have for it.

    Raises:
        InputError: where `calibration` says where it is: `items-differ` and those of `load_tokens`.
    """
    folders = (side.bundle.path / place for place in ("model", "onnx"))
    folder = next((each for each in folders if (each / "tokenizer_config.json").is_file()), None)
    if folder is None:
        return Text(None, _numbers), ["flipped words are shown as numbers: the bundle has no tokenizer"]
    missing = next((package for package in ("torch", "transformers") if not machine.has(package)), None)
    if missing is not None:
        return Text(None, _decode_alone(folder)), [_without(data, f"{missing} is not installed")]
    decode: Decode = _numbers
    try:
        tokenizer = _loaded(folder)
        decode = functools.partial(_decoded, tokenizer)
        return Text(_ids(side, tokenizer, items, data, calibration or data.set), decode), []
    except InputError as problem:
        if calibration is not None:
            raise
        return Text(None, decode), [_without(data, problem.line())]


def _ids(side: BundleSide, tokenizer: Any, items: Items, data: Data, reference: str) -> Array:
    """The scored token ids, [samples, tokens], read again.

    Raises:
        InputError: `items-differ`, other ids; those of `load_tokens`.
    """
    samples = int(np.unique(items.sequence).size)
    chosen = side.manifest.recipe.get("calibration") or {}
    size = config_of(side.bundle).get("vocab_size")
    found = load_tokens(
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
    _demand_scored(found.sha256, data, reference)
    ids: Array = found.ids.numpy()
    return ids


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(f"#{each}" for each in ids)


def _decode_alone(folder: Path) -> Decode:
    """Ids as text by the tokenizer's file alone; as numbers, where that cannot be had."""
    try:
        return Tokenizer(folder).decode
    except QuantkitError:
        return _numbers


def _demand_scored(found: str, data: Data, where: str) -> None:
    if found != data.sha256:
        rule = f"those that were scored have {data.sha256[:12]}"
        raise InputError("items-differ", where=where, value=f"its tokens have the hash {found[:12]}", rule=rule)


def _without(data: Data, why: str) -> str:
    return f"flipped words are shown without their text ({why}); it is {data.set}, and --calibration says where"


def _loaded(folder: Path) -> Any:
    """The tokenizer as transformers has it, with which the text was tokenized.

    Raises:
        InputError: `tokenizer-damaged`.
    """
    try:
        return pretrained.tokenizer(folder)
    except InputError:
        raise
    except Exception as problem:  # whatever a damaged file makes the library raise
        said = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise InputError("tokenizer-damaged", where=str(folder), value=said) from problem


def _flip(a: Items, b: Items, text: Text, item: int, rise: float, starts: dict[int, int]) -> WordFlip:
    sequence = int(a.sequence[item])
    position = item - starts[sequence]
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


EXAMPLES = 5
# a difference in accuracy of less is called none
ACCURACY, LATENCY = 0.01, 0.05


@dataclass(frozen=True)
class Margins:
    """Differences of less are nobody's concern.

    Args:
        accuracy: one item in a hundred, 0.01 nats of KL, a perplexity 1 % higher, 0.01 of a cosine. None: those, and
            what is worse by more is still no failure where the gates of B's recipe allow it.
        latency: 0.05 is 5 % slower. Two runs of one thing are rarely closer. None: that, and what is slower than the
            float model is still no failure where B's own verdict ships it.
        size: 0.01 is 1 % larger.
    """

    accuracy: float | None = None
    latency: float | None = None
    size: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what is no margin."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise InputError(
                    "margin-invalid",
                    where=f"--{name}-margin",
                    value=value,
                    rule="a margin is above zero: nothing is ever shown to be equal",
                )


@dataclass(frozen=True)
class _Scored:
    asked: Sequence[Quantity]
    data: str
    runtimes: tuple[str, str]
    flips: WordFlips | None
    notes: Sequence[str]


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
    """Set B against A.

    Args:
        margins: see `Margins`.
        runtime: whose scores are compared, and in which that run times both, where they can be timed in it.
        batches: of that run; None is those of `measure --quick`.
        seconds: for all of that run.
        examples: flipped words of each kind that are shown.
        timer: takes the times of that run; None: this machine.

    Raises:
        InputError: `usage`, `unknown-runtime`, `models-differ`, `items-differ`, `items-missing`, `hash-mismatch`,
            `values-invalid`, and those of `open_sides` and `compare_times.prepare`.
        MissingDependency: scipy; onnxruntime, to time.
    """
    progress, margins = progress or Progress(), margins or Margins()
    _demand_sense(measure, speed, runtime, {"--batch": batches, "--seconds": seconds})
    progress.plan({"verify": 2.0, **({"speed": 60.0 + (seconds or QUICK.seconds)} if measure and speed else {})})
    progress.at("verify", 0.0, "hashes")
    both = open_sides(a, b)
    timing: BundleTiming | None = None
    notes: list[str] = []
    if measure and speed:
        timing, notes = sides.prepare(
            *both,
            batches=batches,
            seconds=seconds,
            calibration=calibration,
            runtime=runtime,
            here=timer is None,
        )
        timing = replace(timing, timer=timer) if timer is not None else timing
    scored = _scored(*both, margins.accuracy or ACCURACY, runtime, calibration, examples)
    latency = margins.latency or LATENCY
    timed, said = _timed(*both, latency, timing, progress) if speed else ([], [])
    sized = _sized(*both, scored.runtimes, margins.size)
    asked = [*scored.asked, *timed, *sized]
    decisions = decided(asked)
    again = _again(asked, decisions, latency, timing, progress) if timing else {}
    limits = _limits(both[1], asked) if margins.accuracy is None else {}
    cells = []
    for i, (each, decision) in enumerate(zip(asked, decisions, strict=True)):
        limit = limits.get(i)
        shipped = _shipped(*both, each) if margins.latency is None and each.what == "latency" else ""
        found = again.get(i, (each, decision))
        cells.append(DecidedCell.of(*found, allowed=limit, shipped=shipped))
    from quantkit.report.compared import because

    kind = both[0].manifest.model.kind

    return Compared(
        model=both[0].manifest.model.name,
        kind=kind,
        a=_named(both[0], scored.runtimes[0]),
        b=_named(both[1], scored.runtimes[1]),
        verdict=verdict(cells),
        exit=exit_code(cells),
        because=because(cells, kind),
        cells=cells,
        data=scored.data,
        flips=scored.flips,
        layers=_layers(*both),
        notes=[*_identical(*both), *scored.notes, *notes, *said],
    )


def _demand_sense(measure: bool, speed: bool, runtime: str | None, timing: Mapping[str, object]) -> None:
    """Refuse what would be asked for and not be done."""
    if measure and not speed:
        raise InputError(
            "usage", where="--measure", value="with --no-speed", rule="it times both", remedy="leave one out"
        )
    for option, value in timing.items():
        if value is not None and not measure:
            rule = "what is recorded is compared, at every batch that both have"
            raise InputError("usage", where=option, value="without --measure", rule=rule, remedy="add --measure")
    if runtime is not None:
        load_runtime(runtime, where="--runtime")


def _scored(
    a: BundleSide, b: BundleSide, margin: float, runtime: str | None, calibration: str | None, examples: int
) -> _Scored:
    if a.manifest.model.kind != "decoder":
        asked, data, notes = by_row(a, b, margin, runtime)
        ran = runtime or next((each.runtime for each in asked if each.runtime), default_runtime(a.bundle))
        return _Scored(asked, _about(data.set, data.split, data.items, "item"), (ran, ran), None, notes)
    first, second, notes = common_runtime(a, b, runtime)
    data = demand_one_text(a, b, a.data(first), b.data(second))
    before, after = a.read(first), b.read(second)
    asked = by_item(before, after, margin, second, f"{a.name} and {b.name}")
    text, missing = scored_text(a, before, data, calibration) if examples else (None, [])
    found = None if text is None else flips(before, after, text, examples)
    about = _about(data.set, data.split, data.items, "position")
    return _Scored(asked, about, (first, second), found, [*notes, *missing])


def _about(name: str, split: str, items: int, unit: str) -> str:
    return f"{items:,} {unit}s of {name} ({split})"


def _timed(
    a: BundleSide, b: BundleSide, margin: float, timing: BundleTiming | None, progress: Progress
) -> tuple[list[Quantity], list[str]]:
    if timing is not None:
        return sides.of_run(timing.run(progress), margin, timing.runtime, timing.timer.device)
    found, notes = sides.recorded(a, b, margin)
    if not found:
        both = " and ".join(dict.fromkeys(side.measure() for side in (a, b)))
        notes = [f"speed is not compared: no batch was timed of both, on one device, against one baseline ({both})"]
    return found, notes


def _again(
    asked: Sequence[Quantity],
    decisions: Sequence[CellDecision],
    margin: float,
    timing: BundleTiming,
    progress: Progress,
) -> dict[int, tuple[Quantity, CellDecision, bool]]:
    """Times that were called worse or better, taken once more: no call rests on one run."""
    called = {
        sides.key(each): i
        for i, (each, decision) in enumerate(zip(asked, decisions, strict=True))
        if each.what == "latency" and decision.answer in ("worse", "better")
    }
    if not called:
        return {}
    progress.note("what was called faster or slower is timed once more")
    places = [(asked[i].name, asked[i].batch, asked[i].shape) for i in called.values()]
    shapes = [shape for shape in timing.job.shapes if (shape.name, shape.batch, shape.sizes) in places]
    second, _ = sides.of_run(timing.run(progress, shapes), margin, timing.runtime, timing.timer.device)
    found = {}
    for each, decision in zip(second, decided(second), strict=True):
        i = called[sides.key(each)]
        found[i] = (each, confirm(decisions[i], decision), decision.answer == decisions[i].answer)
    return found


def _sized(a: BundleSide, b: BundleSide, runtimes: tuple[str, str], margin: float) -> list[Quantity]:
    """The bytes that each side's runtime loads: counted, so nothing about it is uncertain."""
    (one, _), (other, _) = (side.size(runtime) for side, runtime in zip((a, b), runtimes, strict=True))
    if not one or not other:
        return []
    larger = log(other / one)
    known = MeasuredValue(larger, (larger, larger))
    evidence = difference(known, KNOWN, margin=margin, alarm=margin, logarithm=True)
    return [Quantity("size", "size.bytes", one, other, "B", "counted", evidence, runtime=runtimes[1])]


def _limits(side: BundleSide, asked: Sequence[Quantity]) -> dict[int, float]:
    """How much worse in accuracy the gates of a bundle's recipe allow it to be; none where none of them is about it.

    Where one is, what no gate follows for is told and not judged: as the compile has it.
    """
    if side.floating:
        return {}
    gates = Gates.model_validate(side.manifest.recipe.get("gates") or {})
    known = {i: allowed(gates, each.name, each.a) for i, each in enumerate(asked) if each.what == "accuracy"}
    if all(limit is None for limit in known.values()):
        return {}
    return {i: inf if limit is None else limit for i, limit in known.items()}


def _shipped(a: BundleSide, b: BundleSide, asked: Quantity) -> str:
    """Why a time that is worse than the float model's is no failure: B's verdict ships it all the same, and says so."""
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


def _layers(a: BundleSide, b: BundleSide) -> list[LayerPair]:
    outputs = []
    for side in (a, b):
        harm = None if side.floating else read_harm(side.bundle.path)
        outputs.append({} if harm is None else {layer.name: layer.error for layer in harm.layers})
    layers = [[] if side.floating else side.manifest.layers for side in (a, b)]
    return layer_pairs(layers[0], layers[1], (outputs[0], outputs[1]))


def _identical(a: BundleSide, b: BundleSide) -> list[str]:
    return ["A and B hold the same content, byte for byte: what differs is noise"] if a.subject == b.subject else []
