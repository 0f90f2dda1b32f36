"""Search for the groups of layers whose inputs a TensorRT network should quantize, by timing on the GPU.

A Q/DQ pair before a product lets it multiply in 8 bits, but the conversion may take longer than that saves. The answer
depends on shapes, batch and GPU, so each placement of pairs is built as an engine, timed, and compared with the network
without pairs. The search is a coordinate descent from the compiled placement: it switches the groups one after another,
keeps a switch that is faster by more than the noise within the limit on harm, and ends when no switch helps. A journal
in the cache keeps every measurement, so a killed search continues.

The bundle does not change: the result is a list of `overrides` for the recipe.
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


# relative gain that a switch needs beyond both intervals
MARGIN = 0.01


@dataclass(frozen=True)
class PlacementTime:
    """The measurement of one placement.

    Args:
        seconds: median time of a step.
        spread: half the width of its 95 % interval, relative to `seconds`.
        harm: distance from the network without pairs: KL in nats a token for a language model, else one minus the mean
            cosine of the outputs.
    """

    seconds: float
    spread: float
    harm: float


@dataclass(frozen=True)
class FoundPlacement:
    """The result of a search.

    Args:
        off: groups whose inputs should stay in 16 bits.
        before: measurement of the compiled placement.
        after: measurement of the best placement.
        tried: number of measured placements, those of the journal included.
    """

    off: tuple[str, ...]
    before: PlacementTime
    after: PlacementTime
    tried: int

    @property
    def gain(self) -> float:
        """Speed of the best placement relative to the compiled one."""
        return self.before.seconds / self.after.seconds

    def overrides(self, groups: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        """Return overrides for a recipe, which leave the inputs of these layers unquantized."""
        kinds = dict.fromkeys(name.rpartition(".")[2] for group in self.off for name in groups[group])
        return [{"match": f"*.{kind}", "activations": None} for kind in kinds]

    def keep(self, groups: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the nodes of a graph to keep in floats: a product quantizes both its operands or neither."""
        return list(dict.fromkeys(name for group in self.off for name in groups[group]))


Measure = Callable[[frozenset[str]], PlacementTime]
Report = Callable[[float, str], None]


def search(
    groups: Collection[str], measure: Measure, *, harm_max: float, journal: Path, progress: Report | None = None
) -> FoundPlacement:
    """Search for the fastest placement. Raises InputError `nothing-to-tune` without groups.

    Args:
        groups: names of the groups.
        measure: function that measures the placement with these groups off; not called for placements in the journal.
        harm_max: largest harm of a placement; a placement no worse than the compiled one is allowed too.
        journal: file of all measurements so far.
        progress: function that is called with the share of the round that is done, and a text.
    """
    if not groups:
        value, rule = "no Q/DQ pair before a product", "the search switches pairs, which need static scales of inputs"
        remedy = "--recipe int8-tensorrt"
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
    """Read the journal without a truncated last line."""
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


# tokens of the shipped text for the comparison; timed steps, their batch and context
_TOKENS, _STEPS, _BATCH, _CONTEXT = 256, 60, 1, 512
# largest harm: KL in nats a token of a language model; one minus the cosine of other outputs
_KL, _COSINE = 0.02, 0.01
_LOGITS = "\0logits of a language model"
Array = np.ndarray[Any, Any]
Build = Callable[[Path], "EngineModel | LoadedGraph"]


def autotune(
    bundle: Bundle, options: Mapping[str, Any], *, inputs: Path | None = None, progress: Report | None = None
) -> tuple[FoundPlacement, dict[str, Any]]:
    """Search for the best placement of a bundle's network on this machine's GPU.

    Args:
        bundle: a bundle with `engine/network.onnx`.
        options: settings of the TensorRT exporter.
        inputs: `.npz` file with one batch of each input of a graph; language models use a shipped text.
        progress: function that is called with the share that is done, and a text.

    Returns:
        (result of the search, changes of the recipe). The changes are `overrides`, or `keep` for a graph; they are
        empty if no placement is faster.

    Raises InputError: `gpu-absent`, `engine-missing`, `inputs-missing`, `inputs-differ`, `nothing-to-tune`, those of a
    build.
    """
    exporter = load_exporter(exporters_that_store("engine")[0])
    runtime = load_runtime(str(options.get("library", "tensorrt_rtx")))
    assert isinstance(runtime, TensorrtRuntime)
    why = runtime.why_not_here()
    if why is not None:
        value, rule, remedy = why, "placements are timed on the GPU", "run the command on the machine with the GPU"
        raise InputError("gpu-absent", where="--autotune-qdq", value=value, rule=rule, remedy=remedy)
    folder = bundle.path / FOLDER
    if not (folder / NETWORK).is_file():
        value, rule = f"no {FOLDER}/{NETWORK}", "the search needs the network from which engines are built"
        remedy = f"quantkit export {bundle.path} --to tensorrt"
        raise InputError("engine-missing", where=str(bundle.path), value=value, rule=rule, remedy=remedy)
    bundle.demand_intact(f"{FOLDER}/network")
    gpus, _ = machine.gpus()
    network = folder / NETWORK
    graph = "input_ids" not in inputs_of(network)
    if graph and inputs is None:
        rule, remedy = "placements are compared on real inputs", "--inputs inputs.npz, with an array for each input"
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
    """Return token ids [1, n] of the shipped text's `tune` split, with the bundle's tokenizer."""
    from quantkit.runtimes.text import Tokenizer

    text = (content.folder("calibration") / "prose-en" / "tune.txt").read_text(encoding="utf-8")
    return np.array([Tokenizer(folder).encode(text[: 8 * _TOKENS])[:_TOKENS]])


class Placements:
    """A function that measures the placement with the given groups off.

    Args:
        folder: `engine/` of a bundle.
        groups: names of the layers of each group.
        build: function that builds and opens an engine from a folder with `engine/network.onnx`.
        feed: token ids [1, T] or the inputs of a graph, for the comparison.
        timed: function that returns seconds of repeated steps; None times on the GPU. For tests.
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
        """Build, time and compare an engine."""
        if self._floats is None:
            self._floats = self._outputs(self._made(frozenset(self._groups))[0])
        model, taken = self._made(off)
        middle = float(np.median(taken))
        # 95 % interval of a median by its standard error, 1.2533 σ / √n
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
    """Return the mean KL of logits in nats a token, or one minus the least mean cosine of other outputs."""
    if _LOGITS in one and len(one) == 1:
        first, second = (_log_chances(outputs[_LOGITS]) for outputs in (one, other))
        return float((np.exp(first) * (first - second)).sum(axis=-1).mean())
    return max(1 - _cosine(one[name], other[name]) for name in one)


def _cosine(one: Array, other: Array) -> float:
    """Return the mean cosine over rows (the first axis); two rows of zeros are equal."""
    first, second = (rows.reshape(len(rows), -1).astype(np.float64) for rows in (one, other))
    sizes = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (first * second).sum(axis=1)
    return float(np.where(sizes > 0, products / np.where(sizes > 0, sizes, 1), 1.0).mean())


def _log_chances(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
