"""Score and generate on this device: beside the float model, position by position, or token by token.

A checkpoint in torch, or an engine, runs block by block in the torch that is installed here, with the usual scoring
code: two whole models of the sizes that engines are for would not fit in memory. Whatever the runtime, the device
sends back each position's numbers, or the outputs; the machine that asked makes rows of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from quantkit import machine
from quantkit.devices.answers import (
    NUMBERS,
    POSITIONS,
    LoadedPart,
    MadeTokens,
    Rows,
    SampleOutputs,
    ScoredStretch,
    SessionSettings,
    dumped,
)
from quantkit.errors import GateError, InputError
from quantkit.measurement.timing import speed
from quantkit.runtimes import apart, child, load_runtime
from quantkit.runtimes.generate import Sampling, stream
from quantkit.runtimes.torch import RUNTIME as TORCH

Array = NDArray[Any]
# logits of one model in memory at one time; samples of a graph in one run; texts of one cell
_LOGITS, _SAMPLES, _TEXTS = 1 << 22, 8, 32
# positions whose logits, of both models, are in memory at one time
_ROWS = 64
# most output numbers of all samples: see `answers.ANSWER`
_MOST = 10_000_000


class Outbox:
    """Sender of a work's cells to the machine that asked.

    Args:
        done: known cells, rounds with their rows; the machine that asked has them already.
    """

    def __init__(self, caller: child.Caller, done: Mapping[str, Rows]) -> None:
        self.done, self._caller = done, caller
        self.at, self.note = caller.at, caller.note

    def give(self, cell: str, *answers: BaseModel | dict[str, Any]) -> None:
        """Send a cell, unless it is known."""
        if cell not in self.done:
            rows = [answer if isinstance(answer, dict) else dumped(answer) for answer in answers]
            self._caller.row({"cell": cell, "rows": rows})


def score(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `settings`, then stretches of positions or of samples.

    Args:
        job: `of`, a `decoder`, `encoder` or `network`; `ours` and, for a decoder, `theirs`; `streams`, True if torch
            runs both block by block; `data`, an .npz: `ids` [n, T], for an encoder's texts `lengths` [n] too, or a
            graph's inputs; `pooling` and `skip` of an encoder: see `measurement.accuracy.purpose`.
    """
    if job["of"] == "network":
        _network(job, outbox)
    elif job["of"] == "encoder":
        _encoder(job, outbox)
    elif load_runtime(job["ours"]["runtime"]).own is not None:
        _apart(job, outbox)
    elif job["streams"]:
        _streamed(job, outbox)
    else:
        _decoder(job, outbox)


def _decoder(job: Mapping[str, Any], outbox: Outbox) -> None:
    ids, sides = speed.samples_of(job["data"])["ids"], (job["ours"], job["theirs"])
    speed.demand_room([Path(side["path"]) for side in sides])
    ours, theirs = (_opened(side["path"], side["runtime"]) for side in sides)
    outbox.give("settings", SessionSettings(settings=dict(ours.settings)))
    few = max(1, _LOGITS // theirs.vocabulary)
    # a graph with two ways to multiply is scored in both, as in `measurement.accuracy.score`
    ways = {way: ours.prompt_rows - 1 if way == "steps" else 0 for way in ours.ways} or {"": 0}
    for number, (way, most) in enumerate(ways.items()):
        for sequence, tokens in enumerate(ids):
            outbox.at((number + sequence / len(ids)) / len(ways), f"sequence {sequence + 1} of {len(ids)}")
            if _cells(way, sequence, len(tokens)).keys() <= outbox.done.keys():
                continue
            states = [model.state(1, len(tokens)) for model in (ours, theirs)]
            parts: list[dict[str, Array]] = []
            for start in range(0, len(tokens) - 1, few):
                part = tokens[None, start : min(start + few, len(tokens) - 1)]
                pieces = [part[:, at : at + (most or few)] for at in range(0, part.shape[1], most or few)]
                own = np.concatenate([ours.run(states[0], piece)[0] for piece in pieces])
                other = theirs.run(states[1], part)[0]
                parts.append(positions(tokens[start + 1 : start + 1 + part.shape[1]], other, own))
            numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            _demand_finite(numbers, sequence)
            _give_stretches(outbox, way, sequence, numbers)


def _cells(way: str, sequence: int, tokens: int) -> dict[str, int]:
    """Return cell -> index of its first position."""
    return {f"scored-{way}-{sequence}-{start}": start for start in range(0, tokens - 1, POSITIONS)}


def _give_stretches(outbox: Outbox, way: str, sequence: int, numbers: Mapping[str, Array]) -> None:
    for cell, start in _cells(way, sequence, len(numbers["kl"]) + 1).items():
        lists = {name: values[start : start + POSITIONS].tolist() for name, values in numbers.items()}
        outbox.give(cell, ScoredStretch(way=way, sequence=sequence, numbers=lists))  # type: ignore[arg-type]


def positions(following: Array, original: Array, candidate: Array) -> dict[str, Array]:
    """Apply the formulas of `measurement.accuracy.positions` in NumPy, since a device may lack torch.

    Args:
        following: [P] next tokens.
        original, candidate: logits [P, V].

    Returns:
        Fields of `positions.Items` except the sequence, [P] each.
    """
    at = np.arange(len(following))
    best_o, best_c = original.argmax(axis=1), candidate.argmax(axis=1)
    o, c = original - original[at, best_o][:, None], candidate - candidate[at, best_c][:, None]
    chances = np.exp(o)
    sum_o = chances.sum(axis=1, dtype=np.float64)
    log_o, log_c = np.log(sum_o), np.log(np.exp(c).sum(axis=1, dtype=np.float64))
    at_o, at_c = o[at, following], c[at, following]
    with np.errstate(invalid="ignore"):
        # a token with probability 0 in the original adds nothing
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


def _demand_finite(numbers: Mapping[str, Array], sequence: int) -> None:
    for name in ("nll_original", "nll_candidate", "kl"):
        if not np.isfinite(numbers[name]).all():
            side = "the float model" if name == "nll_original" else "the model"
            where = f"sequence {sequence}, position {int(np.flatnonzero(~np.isfinite(numbers[name]))[0])}"
            value = f"{side} gives NaN, or probability 0 to a token that needs more"
            raise GateError("logits-not-finite", where, value, "logits are finite")


def _streamed(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Score a decoder in torch; all cells are sent after both models have run."""
    import torch

    from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
    from quantkit.measurement.accuracy.score import score as scored

    ids = speed.samples_of(job["data"])["ids"]
    if all(_cells("", sequence, len(tokens)).keys() <= outbox.done.keys() for sequence, tokens in enumerate(ids)):
        return
    items = scored(
        TORCH.stream(Path(job["theirs"]["path"])),
        _candidate(job, outbox),
        TokenSet(torch.from_numpy(ids), "scored", "eval", ids_sha256(ids)),
        lambda share: outbox.at(share, f"scoring {len(ids)} sequences"),
    )
    for sequence in range(len(ids)):
        of = items.sequence == sequence
        _give_stretches(outbox, "", sequence, {n: v[of] for n, v in vars(items).items() if n != "sequence"})


def _apart(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Score a decoder in its runtime's own Python, which opens the bundle, then the float model."""
    import torch

    ids, runner = speed.samples_of(job["data"])["ids"], load_runtime(job["ours"]["runtime"])
    apart.add_this(runner.name)
    models, sides = [], []
    for number, side in enumerate(("ours", "theirs")):
        report = partial(_half, outbox, number)
        models.append(runner.opens_apart(Path(job[side]["path"]), report))
        sides.append(models[-1].scores(torch.from_numpy(ids)))
    settings = {**models[0].settings, "baseline_runtime": runner.name}
    outbox.give("settings", SessionSettings(settings=settings, versions=dict(models[0].versions)))
    for sequence, tokens in enumerate(ids):
        parts: list[dict[str, Array]] = []
        for start in range(0, len(tokens) - 1, _ROWS):
            part = slice(start, min(start + _ROWS, len(tokens) - 1))
            own, other = (scores(sequence, part).numpy() for scores in sides)
            parts.append(positions(tokens[start + 1 : part.stop + 1], other, own))
        numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        _demand_finite(numbers, sequence)
        _give_stretches(outbox, "", sequence, numbers)


def _half(outbox: Outbox, number: int, share: float, words: str) -> None:
    outbox.at((number + share) / 2, f"{('the bundle', 'the float model')[number]}: {words}")


def load(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `settings`, then the answers of servers that were loaded in turns, in parts.

    Args:
        job: `runtime`; `load`, fields of `ServerLoad`; `folders`, side -> its checkpoint; `order`, sides of the visits.
    """
    from quantkit.measurement.load import ServerLoad
    from quantkit.pipeline.load import in_turns

    apart.add_this(job["runtime"])
    folders = {side: Path(place) for side, place in job["folders"].items()}
    asked = ServerLoad(**job["load"])
    answers, about = in_turns(asked, folders, job["order"], outbox.at)
    settings = {**about["settings"], "on_gpu": about["device"]["kind"] == "gpu"}
    outbox.give("settings", SessionSettings(settings=settings, versions=about["versions"]))
    step = max(1, NUMBERS // asked.output)
    for number, answer in enumerate(answers):
        known = {name: value for name, value in answer.items() if not isinstance(value, list)}
        lists = {name: value for name, value in answer.items() if isinstance(value, list)}
        if starts := lists.get("start_times"):  # of a clock that began with the machine
            lists["start_times"] = [at - min(starts) for at in starts]
        for first in range(0, max(map(len, lists.values()), default=1), step):
            part = {name: values[first : first + step] for name, values in lists.items()}
            outbox.give(f"load-{number}-{first}", LoadedPart.model_validate(known | _rounded(part)))


def _rounded(value: Any) -> Any:
    """Round numbers to seven digits, in lists and dictionaries: more than any clock has, in half the bytes."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _candidate(job: Mapping[str, Any], outbox: Outbox) -> Any:
    """Open the candidate and send its settings; an engine runs only if its hash is the job's."""
    candidate = load_runtime(job["ours"]["runtime"]).open(Path(job["ours"]["path"]), built=job["built"])
    outbox.give("settings", SessionSettings(settings=dict(candidate.settings)))
    return candidate


def _encoder(job: Mapping[str, Any], outbox: Outbox) -> None:
    from quantkit.measurement.accuracy.purpose import pooled

    data, pooling, skip = speed.samples_of(job["data"]), tuple(job["pooling"]), job["skip"]
    ids = data["ids"]
    lengths = data.get("lengths", np.full(len(ids), ids.shape[1]))
    if job["streams"]:
        from quantkit.measurement.accuracy.purpose import embeddings

        texts = [text[:length].tolist() for text, length in zip(ids, lengths, strict=True)]
        vectors = embeddings(_candidate(job, outbox), texts, pooling, skip)
        outputs(len(texts), lambda part: {"pooled": vectors[part]}, outbox, step=_TEXTS)
        return
    model = _opened(job["ours"]["path"], job["ours"]["runtime"])
    outbox.give("settings", SessionSettings(settings=dict(model.settings)))

    def run(part: slice) -> dict[str, Array]:
        vectors: dict[int, Array] = {}
        # texts of one length together, without padding, as in `measurement.accuracy.embed`
        for length in np.unique(lengths[part]):
            places = np.flatnonzero(lengths[part] == length)
            states = model.encode(np.ascontiguousarray(ids[part][places, :length]))
            vectors |= zip(places.tolist(), pooled(states, pooling, skip), strict=True)
        return {"pooled": np.stack([vectors[place] for place in range(len(vectors))])}

    outputs(len(ids), run, outbox)


def _network(job: Mapping[str, Any], outbox: Outbox) -> None:
    samples = speed.samples_of(job["data"])
    graph = speed.opened_graph(Path(job["ours"]["path"]), machine.cores(), job["ours"]["runtime"])

    def run(part: slice) -> dict[str, Array]:
        arrays = graph({name: np.ascontiguousarray(values[part]) for name, values in samples.items()})
        return {name: np.atleast_1d(array) for name, array in arrays.items()}

    # a graph with a fixed batch needs exactly that
    outputs(len(next(iter(samples.values()))), run, outbox, step=graph.batch or _SAMPLES)


def outputs(count: int, run: Callable[[slice], Mapping[str, Array]], outbox: Outbox, step: int = _SAMPLES) -> None:
    """Send a cell for every `step` samples, preceded by partial cells if a line cannot hold them.

    Raises InputError: `outputs-too-many`.
    """
    for first in range(0, count, step):
        cell = f"outputs-{first}"
        if cell in outbox.done:
            continue
        outbox.at(first / count, f"sample {first + 1} of {count}")
        arrays = run(slice(first, min(first + step, count)))
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        per_sample = flat.size / min(step, count - first)
        if per_sample * count > _MOST:
            value, rule = f"each gives {int(per_sample):,} numbers", f"a device sends at most {_MOST:,} numbers"
            remedy = "use fewer samples: another calibration set"
            raise InputError("outputs-too-many", f"{count} samples", value, rule, remedy)
        shapes = {name: array.shape for name, array in arrays.items()}
        for at in range(0, max(flat.size, 1), NUMBERS):
            part = SampleOutputs(first=first, shapes=shapes, at=at, numbers=flat[at : at + NUMBERS].tolist())
            outbox.give(cell if at + NUMBERS >= flat.size else f"{cell}-{at}", part)


def generate(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `made`: tokens in, tokens out, so that a device needs no tokenizer.

    Args:
        job: `place`, `runtime`; `ids`, `ends`, `new_tokens`; `sampling`, fields of `runtimes.generate.Sampling`;
            `seed`.
    """
    place, runtime = Path(job["place"]), job["runtime"]
    model: Any = TORCH.decoder(place) if runtime == TORCH.name else _opened(place, runtime)
    sampling = Sampling(**job["sampling"], generator=np.random.default_rng(job["seed"]))
    ids: list[int] = []
    started = first = time.perf_counter()
    for tokens in stream(model, np.array([job["ids"]]), job["new_tokens"], sampling):
        first = first if ids else time.perf_counter()
        if int(tokens[0]) in job["ends"]:
            break
        ids.append(int(tokens[0]))
        outbox.at(len(ids) / job["new_tokens"], f"token {len(ids)}")
    seconds = time.perf_counter() - started
    outbox.give("made", MadeTokens(ids=tuple(ids), seconds=seconds, first_token_s=first - started))


def _opened(place: str | Path, runtime: str) -> Any:
    return speed.opened(str(place), {}, machine.cores(), runtime)
