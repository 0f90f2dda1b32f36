"""Collect the answers of each side, item by item, so that a night is decided on pairs and can be read again later.

decoder   the next words kept in each bundle (`measurement.accuracy`); flipped ones with their text
graph     the class of each scoring sample, and KL from the float graph, computed now
encoder   whether each scoring pair is found at first rank, computed now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.accuracy import positions
from quantkit.measurement.compared import WordFlip
from quantkit.measurement.rows import read_rows
from quantkit.measurement.timing.rounds import CANDIDATE
from quantkit.nightly.evidence import UNSCORED
from quantkit.nightly.records import Side
from quantkit.pipeline.compare import flips, scored_text
from quantkit.pipeline.graphs.bundles import file_of, holds_graph, is_network
from quantkit.pipeline.request import Request
from quantkit.pipeline.sides import BundleSide as Compared
from quantkit.pipeline.sides import demand_one_text
from quantkit.runtimes import load_runtime

Array = NDArray[Any]
# flipped words of each kind that keep their text: those with the largest change
_TEXTS = 100


# columns of one side, by item: see `records.Item`
_Answers = Mapping[str, Array | None]


@dataclass(frozen=True)
class Answered:
    """Items of all sides scored on the same data, without night, build and attempt; and flags of the result."""

    items: Sequence[Mapping[str, Any]]
    flags: Sequence[str] = ()


def answered(bundles: Mapping[Side, Bundle], runtime: str, request: Request) -> Answered:
    """Collect the answers of all sides; an obstacle becomes a flag and does not end the build.

    Args:
        request: compile request of the candidate.
    """
    candidate = bundles[CANDIDATE]
    try:
        if holds_graph(candidate):
            return _run(bundles, _graph(candidate, request))
        if candidate.manifest.model.kind == "decoder":
            return _kept(bundles, runtime, request)
        return _run(bundles, _encoder(runtime, request))
    except QuantkitError as problem:
        return Answered([], [f"{UNSCORED}: {problem.line()}"])


def _kept(bundles: Mapping[Side, Bundle], runtime: str, request: Request) -> Answered:
    """Read the answers kept in the bundles."""
    ours = _side(bundles[CANDIDATE])
    at, flags = _runtime(ours, runtime)
    data = demand_one_text(ours, ours, ours.data(at), ours.data(at))
    scored: dict[Side, positions.Items] = {CANDIDATE: ours.read(at)}
    for side, bundle in bundles.items():
        if side == CANDIDATE:
            continue
        other = _side(bundle)
        try:
            there, added = _runtime(other, runtime)
            demand_one_text(other, ours, other.data(there), data)
            scored[side] = other.read(there)
            flags += added
        except QuantkitError as problem:
            flags.append(f"{UNSCORED}: {side}: {problem.line()}")
    texts: dict[int, str] = {}
    if "baseline" in scored:
        before, after = scored["baseline"], scored[CANDIDATE]
        text, notes = scored_text(ours, after, data, request.recipe.calibration.set)
        flags += notes
        starts = {int(label): int(np.argmax(after.sequence == label)) for label in np.unique(after.sequence)}
        shown = flips(before, after, text, _TEXTS).examples
        texts = {starts[flip.sequence] + flip.position: _words(flip) for flip in shown}
    answers = {side: _of_words(items) for side, items in scored.items()}
    return Answered(_rows(answers, texts), flags)


def _runtime(side: Compared, runtime: str) -> tuple[str, list[str]]:
    """Return the scoring runtime of a bundle, preferably the requested one, and notes for the reader."""
    known = list(side.items())
    if runtime in known or not known:
        return runtime, []
    return known[0], [f"scored in {known[0]}, not in {runtime}"]


def _side(bundle: Bundle) -> Compared:
    path = bundle.path / MEASUREMENTS
    subject = bundle.manifest.content_sha256
    rows = read_rows(path) if path.is_file() else []
    return Compared(str(bundle.path), bundle, False, tuple(row for row in rows if row.subject == subject))


def _of_words(items: positions.Items) -> _Answers:
    right, logp = items.right_candidate, -items.nll_candidate
    return {"correct": right, "kl": items.kl, "logp": logp, "sequence": items.sequence}


def _words(flip: WordFlip) -> str:
    """Describe a flipped word: the words before, the next word, and each side's prediction."""
    before = "" if flip.before is None else f"…{flip.before} → {flip.follows!r}; "
    return f"{before}baseline: {flip.a!r} ({flip.a_chance:.0%}), candidate: {flip.b!r} ({flip.b_chance:.0%})"


def _run(bundles: Mapping[Side, Bundle], answer: Callable[[Bundle], _Answers]) -> Answered:
    """Compute the answers now."""
    by_side, flags = {}, []
    for side, bundle in bundles.items():
        try:
            by_side[side] = answer(bundle)
        except QuantkitError as problem:
            if side == CANDIDATE:
                raise
            flags.append(f"{UNSCORED}: {side}: {problem.line()}")
    return Answered(_rows(by_side, {}), flags)


def _graph(candidate: Bundle, request: Request) -> Callable[[Bundle], _Answers]:
    """Return a function to run a bundle's graph on its scoring samples."""
    from quantkit.graph.open import open_graph
    from quantkit.graph.run import Runner
    from quantkit.measurement.accuracy.labelled import by_item
    from quantkit.pipeline.graphs.answers import answers, classes_of, kinds_of, of_classes
    from quantkit.pipeline.graphs.prepared import inputs_of
    from quantkit.pipeline.request import located

    file = located(request)
    graph = open_graph(file.path)
    samples = inputs_of(request, graph, "eval", file.alias, None)
    expected = answers(graph.model, samples)
    names = classes_of(expected, samples, kinds_of(graph.model))
    if len(names) != 1:
        raise _nothing(graph.name, f"{len(names) or 'none'} of its outputs are classes")

    def answer(bundle: Bundle) -> _Answers:
        outputs = answers(Runner(file_of(bundle), literal=is_network(bundle)), samples)
        right, kl = by_item(
            of_classes(expected[names[0]]), of_classes(outputs[names[0]]), samples.labels, str(bundle.path)
        )
        return {"correct": right, "kl": kl, "sequence": samples.clusters}

    return answer


def samples(request: Request, path: Path, most: int) -> None:
    """Write a graph's first scoring samples to a `.npz` file, for timing."""
    from quantkit.graph.open import open_graph
    from quantkit.pipeline.graphs.prepared import inputs_of
    from quantkit.pipeline.request import located

    file = located(request)
    inputs = inputs_of(request, open_graph(file.path), "eval", file.alias, None)
    np.savez(path, allow_pickle=False, **inputs.first(most))


def _encoder(runtime: str, request: Request) -> Callable[[Bundle], _Answers]:
    """Return a function to embed the scoring pairs."""
    from quantkit.measurement.accuracy.labelled import found_first
    from quantkit.measurement.accuracy.purpose import TextResults, results
    from quantkit.model.source.merged import open_merged
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks import tokens

    source = open_merged(request.model, request.adapters)
    _, scoring = tokens.load(request.recipe, source, calibrate=False, decisions=[])
    pairs = scoring.pairs
    if pairs is None:
        raise _nothing(scoring.name, "no pairs to answer right or wrong")
    result = TextResults(StreamedModel(source).as_it_runs(), scoring, vectors=True)

    def answer(bundle: Bundle) -> _Answers:
        vectors = np.stack(results(load_runtime(runtime).open(bundle.path), result.ids, result))
        return {"correct": found_first(vectors[: len(pairs.left)], vectors[len(pairs.left) :])}

    return answer


def _nothing(where: str, value: str) -> InputError:
    return InputError("items-missing", where=where, value=value, rule="answers are compared one by one")


def _rows(answers: Mapping[Side, _Answers], texts: Mapping[int, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side, columns in answers.items():
        known = {name: column.tolist() for name, column in columns.items() if column is not None}
        for number, values in enumerate(zip(*known.values(), strict=True)):
            text = texts.get(number) if side == CANDIDATE else None
            rows.append({"item": number, "side": side, "text": text, **dict(zip(known, values, strict=True))})
    return rows
