"""Where a network for TensorRT should quantize inputs: a search over groups of layers, for speed, under a gate.

A pair before a product lets it multiply in 8 bits, and costs a conversion that may take longer than that saves; which
it is depends on shapes, batch and GPU, so it is measured. Coordinate descent: all groups begin as they were compiled;
each in turn is switched and the change is kept if a step becomes faster by more than the noise and the gate holds; it
ends when no switch helps. What was measured is kept line by line, so that a search that was killed goes on.

The network of a bundle is content and stays as it is: what is found is a recipe's `overrides`.

Placements of Q/DQ pairs measured on the GPU: each is built as an engine, compared and timed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import content, machine
from quantkit.bundle import Bundle
from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.exporters.tensorrt import graph as pairs
from quantkit.exporters.tensorrt.profiles import inputs_of
from quantkit.pipeline.reload import fed
from quantkit.plugins import exporters_that_store
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt import TensorrtRuntime
from quantkit.runtimes.tensorrt.file import FOLDER, NETWORK
from quantkit.stats.evidence import is_hidden

if TYPE_CHECKING:
    from quantkit.runtimes.tensorrt.decode import EngineModel, LoadedGraph


# a switch has to gain this much, beyond both spreads
MARGIN = 0.01


@dataclass(frozen=True)
class PlacementTime:
    """One placement: seconds of a step (median), half the width of its interval as a share.

    `harm`: how far it is from the network without any pair: KL in nats a token of a language model, one less the mean
    cosine of what any other gives out.
    """

    seconds: float
    spread: float
    harm: float


@dataclass(frozen=True)
class FoundPlacement:
    """What came of a search.

    Args:
        off: groups whose inputs are better left in 16 bits.
        before, after: as compiled, and with those off.
        tried: placements that were measured, now or before.
    """

    off: tuple[str, ...]
    before: PlacementTime
    after: PlacementTime
    tried: int

    @property
    def gain(self) -> float:
        """Speed, how many times as fast."""
        return self.before.seconds / self.after.seconds

    def overrides(self, groups: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        """Give a recipe's overrides: the inputs of these layers are left alone."""
        kinds = dict.fromkeys(name.rpartition(".")[2] for group in self.off for name in groups[group])
        return [{"match": f"*.{kind}", "activations": None} for kind in kinds]

    def keep(self, groups: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the nodes of a graph in floats; both sides of a product are in 8 bits or none."""
        return list(dict.fromkeys(name for group in self.off for name in groups[group]))


Measure = Callable[[frozenset[str]], PlacementTime]
Report = Callable[[float, str], None]


def search(
    groups: Collection[str], measure: Measure, *, harm_max: float, journal: Path, progress: Report | None = None
) -> FoundPlacement:
    """Search for the fastest placement. Raises InputError `nothing-to-tune`: no group.

    Args:
        measure: a placement, by the groups that are off; called once for each that the journal does not know.
        harm_max: what a placement may differ; the start is exempt, it is what was compiled.
        journal: file of what was measured so far.
    """
    if not groups:
        value, rule = "no pair before a product", "inputs with fixed scales have pairs that can be left out"
        remedy = "a recipe with fixed scales of inputs: int8-tensorrt"
        raise InputError("nothing-to-tune", where="--autotune-qdq", value=value, rule=rule, remedy=remedy)
    tell = progress or (lambda share, words: None)
    known = _read(journal)

    def at(off: frozenset[str]) -> PlacementTime:
        if off not in known:
            known[off] = measure(off)
            _write(journal, known)
        return known[off]

    ordered = sorted(groups)
    now: frozenset[str] = frozenset()
    before = best = at(now)
    changed = True
    while changed:
        changed = False
        for place, group in enumerate(ordered):
            switched = now ^ {group}
            tell(place / len(ordered), f"without {', '.join(sorted(switched)) or 'none'}")
            placement = at(switched)
            if placement.harm <= max(harm_max, before.harm) and _faster(placement, best):
                now, best, changed = switched, placement, True
    return FoundPlacement(tuple(sorted(now)), before, best, len(known))


def _faster(one: PlacementTime, other: PlacementTime) -> bool:
    gain = other.seconds / one.seconds
    return gain > 1 + MARGIN and not is_hidden(math.log(gain), MARGIN + one.spread + other.spread)


def _read(journal: Path) -> dict[frozenset[str], PlacementTime]:
    """Read the journal; a last line that was cut off is left out."""
    known = {}
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
            known[frozenset(row["off"])] = PlacementTime(row["seconds"], row["spread"], row["harm"])
        except (ValueError, KeyError, TypeError):
            continue
    return known


def _write(journal: Path, known: Mapping[frozenset[str], PlacementTime]) -> None:
    rows = [
        {"off": sorted(off), "seconds": time.seconds, "spread": time.spread, "harm": time.harm}
        for off, time in known.items()
    ]
    journal.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(journal, "".join(json.dumps(row) + "\n" for row in rows).encode())


# of the shipped text: tokens that placements are compared on, and steps that are timed
_TOKENS, _STEPS, _BATCH, _CONTEXT = 256, 60, 1, 512
# of a language model nats a token, of what gives out other numbers one less the cosine
_KL, _COSINE = 0.02, 0.01
_LOGITS = "\0logits of a language model"
Array = np.ndarray[Any, Any]
Build = Callable[[Path], "EngineModel | LoadedGraph"]


def autotune(
    bundle: Bundle, options: Mapping[str, Any], *, inputs: Path | None = None, progress: Report | None = None
) -> tuple[FoundPlacement, dict[str, Any]]:
    """Search on this machine's GPU.

    Args:
        bundle: with `engine/network.onnx`.
        inputs: of a graph, `.npz`: an array for each of its inputs, of one batch; text is shipped.

    Returns:
        (what came of it, changes of the recipe: `overrides`, of a graph `keep`; empty where nothing gains).

    Raises InputError: `gpu-absent`, `engine-missing`, `inputs-missing`, `inputs-differ`, `nothing-to-tune`, of a build.
    """
    exporter = load_exporter(exporters_that_store("engine")[0])
    runtime = load_runtime(str(options.get("library", "tensorrt_rtx")))
    assert isinstance(runtime, TensorrtRuntime)
    why = runtime.why_not_here()
    if why is not None:
        value, rule, remedy = why, "placements are measured on the GPU that runs them", "run it there"
        raise InputError("gpu-absent", where="--autotune-qdq", value=value, rule=rule, remedy=remedy)
    folder = bundle.path / FOLDER
    if not (folder / NETWORK).is_file():
        value, rule = f"no {FOLDER}/{NETWORK}", "pairs are searched in the network that engines are built from"
        remedy = f"quantkit export {bundle.path} --to tensorrt"
        raise InputError("engine-missing", where=str(bundle.path), value=value, rule=rule, remedy=remedy)
    bundle.demand_intact(f"{FOLDER}/network")
    gpus, _ = machine.gpus()
    network = folder / NETWORK
    graph = "input_ids" not in inputs_of(network)
    if graph and inputs is None:
        rule, remedy = "placements are compared on what it will be given", "--inputs FILE.npz, an array for each input"
        raise InputError("inputs-missing", where="--autotune-qdq", value="a graph", rule=rule, remedy=remedy)
    feed = fed(network, inputs)[0] if graph else tokens(folder)
    key = json.dumps([bundle.manifest.content_sha256, gpus[0]["name"], runtime.name, dict(options)], sort_keys=True)
    name = hashlib.sha256(key.encode() + (inputs.read_bytes() if inputs else b"")).hexdigest()[:32]
    journal = content.cache_dir() / "tune" / f"qdq-{name}.jsonl"

    def build(beside: Path) -> EngineModel | LoadedGraph:
        built = exporter.build(beside, exporter.Options(**options))
        return runtime.open_graph(beside, built=built) if graph else runtime.open(beside, built=built)

    groups = pairs.groups(network)
    measure = Placements(folder, groups, build, feed)
    most = _KL if bundle.manifest.model.kind == "decoder" else _COSINE
    best = search(groups, measure, harm_max=most, journal=journal, progress=progress)
    if not best.off:
        return best, {}
    return best, {"keep": best.keep(groups)} if graph else {"overrides": best.overrides(groups)}


def tokens(folder: Path) -> Array:
    """Return text for guiding a choice, in a bundle's tokens, [1, n]."""
    from quantkit.runtimes.text import Tokenizer

    text = (content.folder("calibration") / "prose-en" / "tune.txt").read_text(encoding="utf-8")
    return np.array([Tokenizer(folder).encode(text[: 8 * _TOKENS])[:_TOKENS]])


class Placements:
    """Measures placements, by the groups that are off.

    Args:
        folder: `engine/` of a bundle.
        build: makes an engine of a folder that has `engine/network.onnx`, and opens it.
        feed: what they are compared on: ids [1, T], or the inputs of a graph.
        timed: seconds of repeated steps, or passes; None: the device's own. For tests.
    """

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, Sequence[str]],
        build: Build,
        feed: Array | Mapping[str, Array],
        timed: Callable[[Any], Sequence[float]] | None = None,
    ) -> None:
        self._folder, self._groups, self._build, self._feed = folder, groups, build, feed
        self._timed = timed or self._steps
        self._floats: dict[str, Array] | None = None

    def __call__(self, off: frozenset[str]) -> PlacementTime:
        """Build, compare, time."""
        if self._floats is None:
            self._floats = self._outputs(self._made(frozenset(self._groups))[0])
        model, taken = self._made(off)
        middle = float(np.median(taken))
        # 95 % of a median by its standard error; few steps, so no more is claimed
        spread = 1.96 * 1.2533 * float(np.std(taken)) / max(len(taken), 1) ** 0.5 / middle
        return PlacementTime(middle, spread, _harm(self._floats, self._outputs(model)))

    def _made(self, off: frozenset[str]) -> tuple[Any, Sequence[float]]:
        with tempfile.TemporaryDirectory(dir=self._folder.resolve().parents[1], prefix=".qdq-") as temporary:
            beside = Path(temporary) / FOLDER
            shutil.copytree(self._folder, beside, ignore=shutil.ignore_patterns("*.engine", "sm*.json"))
            linears = {linear for group in off for linear in self._groups[group]}
            pairs.without(self._folder / NETWORK, beside / NETWORK, linears)
            model = self._build(Path(temporary))
            return model, self._timed(model)

    def _outputs(self, model: Any) -> dict[str, Array]:
        if isinstance(self._feed, Mapping):
            return dict(model.run(self._feed))
        if not model.decoder:
            return {"last_hidden_state": model.encode(self._feed[:, : _longest(model)])}
        ids = self._feed[:, : model.capacity]
        return {_LOGITS: np.asarray(model.run(model.state(1, ids.shape[1]), ids)[0])}

    def _steps(self, model: Any) -> list[float]:
        if isinstance(self._feed, Mapping):
            step = model.repeated(self._feed)
        elif model.decoder:
            step = model.decode(_BATCH, min(_CONTEXT, model.capacity - 1))
        else:
            step = model.prefill(_BATCH, min(self._feed.shape[1], _longest(model)))
        for _ in range(5):
            step()
        return [seconds for _ in range(_STEPS) if (seconds := step()) is not None]


def _longest(model: Any) -> int:
    return int(model.longest(_BATCH, _TOKENS))


def _harm(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the mean KL of logits over positions, nats, or one minus the least mean cosine of other outputs."""
    if _LOGITS in one and len(one) == 1:
        first, second = (_log_chances(outputs[_LOGITS]) for outputs in (one, other))
        return float((np.exp(first) * (first - second)).sum(axis=-1).mean())
    return max(1 - _cosine(one[name], other[name]) for name in one)


def _cosine(one: Array, other: Array) -> float:
    """Return the mean cosine over rows; their number is the first size, and rows of zeros on both sides are equal."""
    first, second = (rows.reshape(len(rows), -1).astype(np.float64) for rows in (one, other))
    sizes = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (first * second).sum(axis=1)
    return float(np.where(sizes > 0, products / np.where(sizes > 0, sizes, 1), 1.0).mean())


def _log_chances(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
