"""What a model says on this device: beside the float model, position by position, or token after token.

A checkpoint in torch, or an engine, is run block by block by the torch that is here, with the very code that scores
elsewhere: whole models of the sizes that engines are for would not fit in memory twice. Whatever runs it, what goes
back are the numbers of each position, or what comes out; rows are made of them where the job came from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.devices.answers import (
    NUMBERS,
    POSITIONS,
    MadeTokens,
    Rows,
    SampleOutputs,
    ScoredStretch,
    SessionSettings,
    dumped,
)
from quantkit.errors import GateError, InputError
from quantkit.measurement.timing.speed import demand_room, opened, opened_graph, samples_of
from quantkit.runtimes import child, load_runtime
from quantkit.runtimes.generate import Sampling, stream
from quantkit.runtimes.torch import RUNTIME as TORCH

Array = NDArray[Any]
# logits of one model that are in memory at one time; samples of a graph in one run
_LOGITS, _SAMPLES = 1 << 22, 8
# texts of one cell
_TEXTS = 32
# numbers that all samples together may give: see `answers.ANSWER`
_MOST = 10_000_000


def score(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """Cells: `settings`, then stretches of positions or of samples.

    Args:
        job: `of`, a `decoder`, `encoder` or `network`; `ours`, and of a decoder `theirs`; `runtime`, that of `floats`,
            None where torch streams both; `data`, an .npz: `ids` [n, T], of an encoder's texts `lengths` [n] too, or a
            graph's inputs; `pooling` and `skip` of an encoder: see `measurement.accuracy.purpose`.
    """
    {"decoder": _decoder, "encoder": _encoder, "network": _network}[job["of"]](job, done, caller)


def _decoder(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    if job["floats"] is None:
        _streamed(job, done, caller)
        return
    ids, threads = samples_of(job["data"])["ids"], machine.cores()
    places = [job[side]["place"] for side in ("ours", "theirs")]
    demand_room([*map(Path, places)])
    sides: list[Any] = [
        opened(place, {}, threads, runtime)
        for place, runtime in zip(places, (job["runtime"], job["floats"]), strict=True)
    ]
    ours, theirs = sides
    settings(ours.settings, done, caller)
    few = max(1, _LOGITS // theirs.vocabulary)
    # a graph that multiplies in two ways is scored in both, as `measurement.accuracy.score` does
    ways = {way: ours.prompt_rows - 1 if way == "steps" else 0 for way in ours.ways} or {"": 0}
    for number, (way, most) in enumerate(ways.items()):
        for sequence, tokens in enumerate(ids):
            caller.at((number + sequence / len(ids)) / len(ways), f"sequence {sequence + 1} of {len(ids)}")
            cells = [f"scored-{way}-{sequence}-{start}" for start in range(0, len(tokens) - 1, POSITIONS)]
            if all(cell in done for cell in cells):
                continue
            states = [model.state(1, len(tokens)) for model in (ours, theirs)]
            parts: list[dict[str, Array]] = []
            for start in range(0, len(tokens) - 1, few):
                part = tokens[None, start : min(start + few, len(tokens) - 1)]
                pieces = [part[:, at : at + (most or few)] for at in range(0, part.shape[1], most or few)]
                own = np.concatenate([ours.run(states[0], piece)[0] for piece in pieces])
                other = theirs.run(states[1], part)[0]
                parts.append(positions(tokens[start + 1 : start + 1 + part.shape[1]], other, own))
            found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            _demand_finite(found, sequence)
            for at, cell in enumerate(cells):
                row = {name: values[at * POSITIONS : (at + 1) * POSITIONS].tolist() for name, values in found.items()}
                if cell not in done:
                    answer = ScoredStretch(way=way, sequence=sequence, found=row)  # type: ignore[arg-type]
                    caller.row({"cell": cell, "rows": [dumped(answer)]})


def positions(following: Array, original: Array, candidate: Array) -> dict[str, Array]:
    """The formulas of `measurement.accuracy.positions` in NumPy, which is all that a device has.

    Args:
        following: [P] the tokens that follow.
        original, candidate: logits [P, V]; the first is written over.

    Returns:
        the numbers of `positions.Items` but the sequence, [P] each.
    """
    at = np.arange(len(following))
    best_o, best_c = original.argmax(axis=1), candidate.argmax(axis=1)
    o, c = original - original[at, best_o][:, None], candidate - candidate[at, best_c][:, None]
    chances = np.exp(o)
    sum_o = chances.sum(axis=1, dtype=np.float64)
    log_o, log_c = np.log(sum_o), np.log(np.exp(c).sum(axis=1, dtype=np.float64))
    at_o, at_c = o[at, following], c[at, following]
    with np.errstate(invalid="ignore"):
        # a token that the original rules out adds nothing
        moved = np.where(chances > 0, chances * (o - c), 0).sum(axis=1, dtype=np.float64)
    return {
        "nll_original": log_o - at_o,
        "nll_candidate": log_c - at_c,
        "kl": np.maximum(moved / sum_o + log_c - log_o, 0.0),
        "agree": best_o == best_c,
        "right_original": best_o == following,
        "right_candidate": best_c == following,
        "best_original": best_o,
        "best_candidate": best_c,
        "chance_original": np.exp(-log_o),
        "chance_candidate": np.exp(-log_c),
    }


def _demand_finite(found: Mapping[str, Array], sequence: int) -> None:
    for name in ("nll_original", "nll_candidate", "kl"):
        if not np.isfinite(found[name]).all():
            side = "the float model" if name == "nll_original" else "the model"
            where = f"sequence {sequence}, position {int(np.flatnonzero(~np.isfinite(found[name]))[0])}"
            value = f"{side} gives NaN, or no chance to a token that it must give one"
            raise GateError("logits-not-finite", where=where, value=value, rule="logits are finite")


def _streamed(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """A decoder in torch; all cells come once both models have run."""
    import torch

    from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
    from quantkit.measurement.accuracy.score import score as scored

    ids = samples_of(job["data"])["ids"]
    cells = {
        (sequence, start): f"scored--{sequence}-{start}"
        for sequence, tokens in enumerate(ids)
        for start in range(0, len(tokens) - 1, POSITIONS)
    }
    if all(cell in done for cell in cells.values()):
        return
    items = scored(
        TORCH.stream(Path(job["theirs"]["place"])),
        _candidate(job, done, caller),
        TokenSet(torch.from_numpy(ids), "scored", "eval", ids_sha256(ids)),
        lambda share: caller.at(share, f"scoring {len(ids)} sequences"),
    )
    own = {name: values for name, values in vars(items).items() if name != "sequence"}
    for (sequence, start), cell in cells.items():
        at = np.flatnonzero(items.sequence == sequence)[start : start + POSITIONS]
        if cell not in done:
            row = {name: values[at].tolist() for name, values in own.items()}
            caller.row({"cell": cell, "rows": [dumped(ScoredStretch(way="", sequence=sequence, found=row))]})


def _candidate(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> Any:
    """What torch streams; of an engine the bytes that are executed are those that the job names."""
    candidate = load_runtime(job["runtime"]).open(Path(job["ours"]["place"]), built=job["ours"]["built"])
    settings(candidate.settings, done, caller)
    return candidate


def _encoder(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    from quantkit.measurement.accuracy.purpose import pooled

    data, pooling, skip = samples_of(job["data"]), tuple(job["pooling"]), job["skip"]
    ids = data["ids"]
    lengths = data.get("lengths", np.full(len(ids), ids.shape[1]))
    if job["floats"] is None:
        from quantkit.measurement.accuracy.purpose import embeddings

        texts = [text[:length].tolist() for text, length in zip(ids, lengths, strict=True)]
        found = embeddings(_candidate(job, done, caller), texts, pooling, skip)
        outputs(len(texts), lambda part: {"pooled": found[part]}, done, caller, step=_TEXTS)
        return
    model: Any = opened(job["ours"]["place"], {}, machine.cores(), job["runtime"])
    settings(model.settings, done, caller)

    def run(part: slice) -> dict[str, Array]:
        vectors: dict[int, Array] = {}
        # texts of one length together: none is padded, as in `measurement.accuracy.purpose`
        for length in np.unique(lengths[part]):
            places = np.flatnonzero(lengths[part] == length)
            states = model.encode(np.ascontiguousarray(ids[part][places, :length]))
            vectors |= zip(places.tolist(), pooled(states, pooling, skip), strict=True)
        return {"pooled": np.stack([vectors[place] for place in range(len(vectors))])}

    outputs(len(ids), run, done, caller)


def _network(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    samples = samples_of(job["data"])
    graph = opened_graph(Path(job["ours"]["place"]), machine.cores(), job["runtime"])
    count = len(next(iter(samples.values())))

    def run(part: slice) -> dict[str, Array]:
        found = graph({name: np.ascontiguousarray(values[part]) for name, values in samples.items()})
        return {name: np.atleast_1d(array) for name, array in found.items()}

    # a graph of a fixed batch takes that
    outputs(count, run, done, caller, step=graph.batch or _SAMPLES)


def outputs(count: int, run: Any, done: Mapping[str, Any], caller: child.Caller, step: int = _SAMPLES) -> None:
    """A cell for some samples; where they give more than a line holds, others before it."""
    for first in range(0, count, step):
        cell = f"outputs-{first}"
        if cell in done:
            continue
        caller.at(first / count, f"sample {first + 1} of {count}")
        arrays = run(slice(first, min(first + step, count)))
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        if flat.size / min(step, count - first) * count > _MOST:
            raise InputError(
                "outputs-too-many",
                where=f"{count} samples",
                value=f"{flat.size // min(step, count - first):,} numbers come out of each",
                rule=f"{_MOST:,} numbers are sent back at most",
                remedy="fewer samples: another calibration set",
            )
        for at in range(0, max(flat.size, 1), NUMBERS):
            answer = SampleOutputs(
                first=first,
                shapes={name: array.shape for name, array in arrays.items()},
                at=at,
                numbers=flat[at : at + NUMBERS].tolist(),
            )
            name = cell if at + NUMBERS >= flat.size else f"{cell}-{at}"
            if name not in done:
                caller.row({"cell": name, "rows": [dumped(answer)]})


def settings(found: Mapping[str, Any], done: Mapping[str, Any], caller: child.Caller) -> None:
    """The cell `settings`: how a model runs."""
    if "settings" not in done:
        caller.row({"cell": "settings", "rows": [dumped(SessionSettings(settings=dict(found)))]})


def generate(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """One cell, `made`: tokens in, tokens out, so that a device needs no tokenizer.

    Args:
        job: `place`, `runtime`; `ids`, `ends`, `new_tokens`; `sampling`, of `runtimes.generate.Sampling`; `seed`.
    """
    model: Any = (
        TORCH.decoder(Path(job["place"]))
        if job["runtime"] == TORCH.name
        else opened(job["place"], {}, machine.cores(), job["runtime"])
    )
    sampling = Sampling(**job["sampling"], generator=np.random.default_rng(job["seed"]))
    made: list[int] = []
    started = first = time.perf_counter()
    for tokens in stream(model, np.array([job["ids"]]), job["new_tokens"], sampling):
        first = first if made else time.perf_counter()
        if int(tokens[0]) in job["ends"]:
            break
        made.append(int(tokens[0]))
        caller.at(len(made) / job["new_tokens"], f"token {len(made)}")
    answer = MadeTokens(ids=tuple(made), seconds=time.perf_counter() - started, first_token_s=first - started)
    caller.row({"cell": "made", "rows": [dumped(answer)]})
