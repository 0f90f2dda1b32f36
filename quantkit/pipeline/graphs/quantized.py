"""Quantize a graph in steps: ranges, codes, pairs, file, checks. The build's journal keeps each finished step.

    ranges              ranges of all tensors with a pair
    codes-0007          codes, scales, biases and decisions of the seventh product, counted from 0
    alone-0007          its harm alone, where some products may stay in floats
    kept-0002-0007      the same product, solved again with two others kept
    point-0002          harm of that point; dropped-0002: its codes were deleted, because it can no longer be chosen

The journal holds numbers; files beside it hold codes, together as large as the quantized weights. A resume repeats no
step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit._version import __version__
from quantkit.bundle import Build, Check, Decision, LayerEntry
from quantkit.errors import GateError
from quantkit.passes import NOTE, decision
from quantkit.pipeline.gates import demand
from quantkit.pipeline.graphs.prepared import PreparedGraph
from quantkit.pipeline.progress import Progress
from quantkit.planning.compiling import Compiling, Disk
from quantkit.planning.support import graph_schemes

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.graph.pairs.placement import Placement
    from quantkit.graph.pairs.qdq import Codes, Range
    from quantkit.graph.run import Feed
    from quantkit.scheme import WeightScheme

MODEL, DATA = "model.onnx", "model.onnx.data"
# samples of one run
BATCH = 8
# samples that codes are solved on: each site runs all of them
SOLVING = 64
# what integer kernels may differ by from the pairs as they are written: codes that lie between two go either way
_RELOAD_LIMIT = 0.05
# what a float32 is moved by to see how far the pairs alone carry such codes, how often, how much of that is allowed,
# and the most: a limit that nothing exceeds is none
_MOVED, _TIMES, _MORE, _MOST = 1e-6, 3, 1.5, 0.5
_INTEGER_SHARE = 0.95
# weights up to so many bytes stand in the file itself
_INLINE = 1 << 28
# of a compile: what Python with torch and ONNX Runtime takes; how often the weights are in memory: the file, the graph,
# a clone, and a session of it; how often what inner tensors hold of a feed
_INTERPRETER, _COPIES, _HELD = 0.7e9, 5, 3
# bytes of a node in a file; of a product's quantizers and names; of its step: a line of the journal, a file's head
_NODE, _SITE, _STEP = 200, 1500, 600


class Steps:
    """Steps of one compile.

    Args:
        build: build with their journal; None keeps none, for callers that need only codes.
    """

    def __init__(self, build: Build | None = None) -> None:
        self.build = build
        self.done: dict[str, Mapping[str, Any]] = {**build.done()} if build is not None else {}
        # processor seconds of steps that another process has done
        self.cpu_before = sum(record["cpu_seconds"] for record in self.done.values())
        self._since = time.process_time()

    def once(self, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Read a step of numbers from the journal, or compute and commit it."""
        if key not in self.done:
            self.commit(key, make(), {})
        return self.done[key]

    def ranges(self, make: Callable[[], Mapping[str, Range]]) -> dict[str, Range]:
        """Observe the ranges of activations, at most once."""
        from quantkit.graph.pairs.qdq import Range

        def told() -> dict[str, Any]:
            return {"ranges": {name: [own.scale, own.zero, own.signed] for name, own in make().items()}}

        return {name: Range(*own) for name, own in self.once("ranges", told)["ranges"].items()}

    def drop(self, key: str, stem: str) -> None:
        """Remove the files of a solve that will not be read again."""
        if self.build is not None and key not in self.done:
            files = [self.path(done) for done in self.done if done.startswith(f"{stem}-")]
            self.commit(key, {}, {}, remove=files)

    def commit(
        self, key: str, record: Mapping[str, Any], files: Mapping[Path, Path], *, remove: Iterable[Path] = ()
    ) -> None:
        """Make a step permanent, with the processor seconds since the one before it."""
        now = time.process_time()
        timed = {**record, "cpu_seconds": now - self._since}
        if self.build is not None:
            self.build.commit(key, timed, files, remove=remove)
        self.done[key], self._since = timed, now

    def path(self, key: str) -> Path:
        """Return the file of a step's codes."""
        assert self.build is not None
        return self.build.steps / f"{key}.safetensors"


class Products:
    """Products of one solve.

    Args:
        stem: prefix of the steps' keys.
        scheme: scheme of weight-only quantization; None for integer products, whose biases compensate rounding.

    Attributes:
        again: codes that were solved before an interruption.
        decisions: name -> decisions of each solved product.
    """

    def __init__(self, steps: Steps, stem: str, names: Sequence[str], scheme: WeightScheme | None = None) -> None:
        self._steps, self._scheme = steps, scheme
        self._keys = {name: f"{stem}-{place:04}" for place, name in enumerate(names)}
        there = {name: key for name, key in self._keys.items() if key in steps.done}
        self.again: dict[str, Any] = {name: self._read(steps.path(key)) for name, key in there.items()}
        self.decisions = {
            name: [Decision.model_validate(taken) for taken in steps.done[key]["decisions"]]
            for name, key in there.items()
        }

    def keep(self, name: str, codes: Any, decisions: Sequence[Decision] = ()) -> None:
        """Commit a product."""
        from safetensors.numpy import save_file

        from quantkit.model import finished

        self.decisions[name] = list(decisions)
        if self._steps.build is None:
            return
        written = self._steps.build.temporary("codes.safetensors")
        if self._scheme is None:
            parts = {part: getattr(codes, part) for part in ("codes", "scale", "bias", "alone")}
            save_file({part: np.ascontiguousarray(own) for part, own in parts.items() if own is not None}, written)
        else:
            finished.save(written, {"product": codes}, {})
        key, record = self._keys[name], {"product": name, "decisions": [taken.as_dict() for taken in decisions]}
        self._steps.commit(key, record, {written: self._steps.path(key)})

    def _read(self, path: Path) -> Any:
        from safetensors.numpy import load_file

        from quantkit.graph.pairs.qdq import Codes
        from quantkit.model.finished import Finished

        if self._scheme is None:
            return Codes(**load_file(path))
        return Finished([path], {"product": self._scheme}).quantized("product")


@dataclass(frozen=True)
class Solved:
    """Codes of the quantized products, in the order in which the graph runs, and the decisions of each product."""

    codes: Mapping[str, Codes]
    decisions: Mapping[str, list[Decision]]


def solving(prepared: PreparedGraph) -> int:
    """Count the feeds for solving codes."""
    return max(1, SOLVING // (prepared.calib.batch or BATCH))


def stem(kept: Collection[str]) -> str:
    """Return the prefix of the steps for a graph with these products kept."""
    return f"kept-{len(kept):04}" if kept else "codes"


class QuantizedGraph:
    """A graph being quantized for ONNX Runtime, with its progress.

    Args:
        steps: keeps finished steps; None keeps none.
    """

    file = Path("onnx") / MODEL

    def __init__(self, prepared: PreparedGraph, progress: Progress, steps: Steps | None = None) -> None:
        from quantkit.graph.codes import solve
        from quantkit.graph.pairs import placement, qdq
        from quantkit.passes.gptq import Gptq
        from quantkit.passes.solvers.unsaturated import bounded

        self.prepared, self.progress = prepared, progress
        self.steps = steps or Steps()
        self.weights, self.activations = graph_schemes(prepared.request.recipe)
        model, sites = prepared.graph.model, prepared.sites
        self._feeds = feeds = list(prepared.calib.feeds(BATCH))
        self.sites = {site.name: site for site in sites}
        build = prepared.request.target.build.get("onnxruntime", {})
        asked = build.get("weight_codes", "uint8")
        self._passes = {step.name: step.settings for step in prepared.request.recipe.passes}
        bound = Gptq.name in self._passes and self._passes[Gptq.name].unsaturated and bounded(self.weights)
        # ConvInteger sums in another order, in which others are neighbours
        bound = bound and not self.activations.dynamic
        # where sums never saturate, the fastest kernel is exact
        fast = asked == "int8" or bound or self.weights.format == "int7"
        self.kind: qdq.WeightType = "int8" if fast else "uint8"
        self._unsaturated = bound and asked != "int8"
        self.placement: Placement = placement.NOWHERE
        self.ranges: dict[str, Range] = {}
        if not self.activations.dynamic:
            placed = partial(placement.place, model, sites, absorbing=not self.activations.symmetric)
            self.placement = placed(self.sites)
            self.ranges = self.steps.ranges(
                lambda: solve.ranges(
                    model,
                    self.placement,
                    feeds,
                    self.activations,
                    signed=build.get("activation_codes") == "int8",
                    report=lambda done, words: progress.at("ranges", done, words),
                    total=len(feeds),
                    keeping=lambda tensors: prepared.keeping(tensors, placed),
                )
            )
        self.found, self.codes = Solved({}, {}), dict[str, qdq.Codes]()
        self.take(self.solved(report=lambda done, words: progress.at("codes", done, words)))

    @property
    def decisions(self) -> list[Decision]:
        """Decisions about the final codes."""
        return [taken for product in self.found.decisions.values() for taken in product]

    def solved(self, kept: Collection[str] = (), report: Callable[[float, str], None] | None = None) -> Solved:
        """Choose codes of all products but those kept, on what the ones before each make of the calibration set.

        Args:
            kept: stay in floats; what stands before the first of them has the codes that it has already.
        """
        from quantkit.graph.codes import solve

        first = next((place for place, name in enumerate(self.sites) if name in kept), 0)
        before = list(self.sites)[:first]
        names = [name for name in self.sites if name not in kept]
        place, ranges = self._placed(names)
        products = Products(self.steps, stem(kept), list(self.sites))
        codes = solve.solved(
            self.prepared.graph.model,
            lambda solved: self.assembled(solved, names),
            [self.sites[name] for name in names],
            self._feeds[: solving(self.prepared)],
            self.weights,
            ranges,
            place,
            passes=self._passes,
            seed=self.prepared.request.recipe.seed,
            unsaturated=self._unsaturated,
            known={name: self.codes[name] for name in before},
            again=products.again,
            keep=products.keep,
            report=report,
        )
        return Solved(codes, {name: self.found.decisions.get(name, []) for name in before} | products.decisions)

    def _placed(self, names: Collection[str]) -> tuple[Placement, dict[str, Range]]:
        """Place pairs, with their ranges, for when these products are quantized."""
        from quantkit.graph.pairs import placement

        if self.activations.dynamic or len(names) == len(self.sites):
            return self.placement, self.ranges
        absorbing = not self.activations.symmetric
        place = placement.place(self.prepared.graph.model, self.prepared.sites, names, absorbing=absorbing)
        # where less is quantized, a tensor may have a pair without the one whose values it moves
        return place, {name: self.ranges[self.placement.same.get(name, name)] for name in place.tensors}

    def assembled(self, codes: Mapping[str, Codes], names: Collection[str] | None = None) -> ir.Model:
        """Return the graph with these products as integers, the others in floats.

        Args:
            names: of all the products that will be, whose pairs are there already; None: those of the codes.
        """
        from quantkit.exporters.onnx import dynamic
        from quantkit.graph.pairs import qdq

        model = self.prepared.graph.model
        if self.activations.dynamic:
            return dynamic.insert(model, codes, self.sites, self.weights, self.activations, weight_type=self.kind)
        place, ranges = self._placed(codes if names is None else names)
        return qdq.insert(model, place, ranges, codes, self.sites, weight_type=self.kind)

    def take(self, solved: Solved) -> None:
        """Have these products quantized, and no others."""
        self.found, self.codes = solved, dict(solved.codes)
        self.model = self.assembled(self.codes)

    def low_bytes(self, name: str) -> int:
        """Count the bytes of a product's weight and its scales, quantized."""
        codes = self.codes[name]
        return codes.codes.size + 4 * codes.scale.size

    def high_bytes(self, name: str) -> int:
        """Count the bytes of a product's weight in floats."""
        return 4 * self.sites[name].weight.size

    def save(self, path: Path) -> None:
        """Write the graph, with its weights beside it."""
        import onnx_ir as ir

        self.model.producer_name, self.model.producer_version = "quantkit", __version__
        for node in self.model.graph:
            node.metadata_props.clear()  # where in torch's source it came from: half of a small file
        apart = sum(value.const_value.nbytes for value in self.model.graph.initializers.values() if value.const_value)
        ir.save(self.model, path, external_data=DATA if apart > _INLINE else None)

    def checks(self, path: Path) -> tuple[list[Check], list[Decision]]:
        """Run the file by integer kernels against its pairs as they are written. Raises GateError.

        `reload.onnxruntime` is the relative error of the worst output, at most 0.05, or 1.5 times what the pairs differ
        by from themselves when the inputs move in their last bits, where that is more; never more than 0.5.
        """
        import onnx_ir as ir

        from quantkit.graph.outputs import steady
        from quantkit.graph.run import Runner

        feed, by = self.prepared.calib.first(BATCH), steady(self.model)
        # what is chosen by them differs as soon as they do
        inner = set(by) - {value.name for value in self.model.graph.outputs}
        file = ir.external_data.load_to_model(ir.load(path)) if inner else path
        written, reloaded = Runner(self.model, by, optimised=False), Runner(file, by)
        expected = {name: value for name, value in written(feed).items() if name in by}
        apart, limit, taken = _apart(reloaded(feed), expected), _RELOAD_LIMIT, list[Decision]()
        if apart > limit:
            # in a deep network every code depends on all before it, so that its own pairs differ by as much
            own = max(_apart(written(_moved(feed, seed)), expected) for seed in range(_TIMES))
            limit = min(max(limit, round(_MORE * own, 3)), _MOST)
            why = f"codes that lie between two carry far: inputs moved by {_MOVED:g}, its pairs differ by {own:.2g}"
            taken = [decision("export", NOTE, "reload.onnxruntime", why, _RELOAD_LIMIT, limit)]
        check = Check(name="reload.onnxruntime", value=apart, limit=limit, ok=apart <= limit)
        demand([check], "nothing was delivered; --recipe int8-dynamic rounds no input beforehand; and please report it")
        return [check, self._kernels(path)], taken

    def _kernels(self, path: Path) -> Check:
        """Check for ONNX Runtime's integer products of all quantized weights. Raises GateError if one is missing."""
        import onnx_ir as ir

        from quantkit.graph import integer
        from quantkit.runtimes.onnxruntime.open import write_optimized

        macs = self.prepared.cost.macs
        sites = [
            integer.QuantizedSite(name, f"{site.stem}.codes", float(macs[name]), site.output)
            for name, site in self.sites.items()
            if name in self.codes
        ]
        with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as place:
            write_optimized(path, Path(place) / MODEL)
            multiplied = integer.found(ir.load(Path(place) / MODEL), sites)
        where = "; ".join(f"{name} runs as {kind}" for name, kind in list(multiplied.floating.items())[:3])
        ok = multiplied.share >= _INTEGER_SHARE and not multiplied.floating
        if not ok:
            value = f"{multiplied.share:.1%} of the multiply-accumulates run in integers"
            rule = f"at least {_INTEGER_SHARE:.0%} of the quantized multiply-accumulates run in integers"
            remedy = "keep these layers in floats: --set 'keep=[NAME]'"
            raise GateError("check-failed", where or path.name, value, rule, remedy)
        return Check(name="integer.macs", value=multiplied.share, limit=_INTEGER_SHARE, ok=ok, where=where)

    def layers(self) -> list[LayerEntry]:
        """Describe each quantized product for the manifest."""
        from quantkit.exporters.onnx.dynamic import activations_of

        layers = []
        for name, codes in self.codes.items():
            site = self.sites[name]
            matrix = site.matrix()
            own = self.ranges.get(self.placement.same.get(site.input, site.input))
            inputs = activations_of(site, self.activations) if own is None else self.activations
            layers.append(
                LayerEntry(
                    name=name,
                    shape=list(matrix.shape),
                    scheme=self.weights.model_dump(mode="json", exclude_none=True),
                    bits_per_weight=(8 * codes.codes.size + 32 * codes.scale.size) / matrix.size,
                    error=float(np.square(codes.values() - matrix).sum() / (np.square(matrix).sum() or 1.0)),
                    activations=inputs.model_dump(mode="json", exclude_none=True),
                    input_scale=None if own is None else own.scale,
                )
            )
        return layers


def _moved(feed: Feed, seed: int) -> Feed:
    """Change the last bits of every float in the samples."""
    noise = np.random.default_rng(seed)
    return {
        name: (own * (1 + _MOVED * noise.standard_normal(own.shape))).astype(own.dtype)
        if own.dtype.kind == "f"
        else own
        for name, own in feed.items()
    }


def _apart(values: Feed, expected: Feed) -> float:
    """||found - expected|| / ||expected|| of the float output where it is largest."""
    return max(
        float(np.linalg.norm(values[name] - own) / (np.linalg.norm(own) or 1.0))
        for name, own in expected.items()
        if own.dtype.kind == "f"
    )


def estimate(prepared: PreparedGraph) -> Compiling:
    """Predict memory and disk of a compile from sizes, for a graph whose inputs were opened.

    All of it is one part, which holds of activations what is shown of one feed, or what products that are still to be
    solved read of all samples.
    """
    graph, sites, scheme = prepared.graph.model.graph, prepared.sites, prepared.request.recipe.scheme.weights
    inputs = sum(array.nbytes for data in (prepared.calib, prepared.scoring) for array in data.arrays.values())
    samples = max(_HELD * (prepared.calib.batch or BATCH), min(SOLVING, len(prepared.calib)) / 2)
    activations = 4.0 * prepared.cost.inner * samples
    memory = {"codes": _INTERPRETER + _COPIES * prepared.graph.bytes + inputs + activations}
    constants = (value.const_value for value in graph.initializers.values())
    network = sum(value.nbytes for value in constants if value is not None) + _NODE * len(graph)
    weights, scales = sizes(prepared)
    if scheme is None or not weights:
        return Compiling(memory, Disk(network, 0, 0))
    rows = sum(site.weight.shape[site.rows] for site in sites)
    # codes are bytes, whatever they hold; of each row a scale and a sum of biases
    bundle = network - 3 * weights + 12 * scales + _SITE * len(sites)
    # in steps a second sum of biases, and where products may be kept, two more solves
    step = weights + 4 * scales + 8 * rows + _STEP * len(sites)
    return Compiling(memory, Disk(bundle, step if prepared.held is None else 3 * step, 0))


def sizes(prepared: PreparedGraph) -> tuple[int, int]:
    """Count the weights and the scales of the products that are quantized."""
    sites, scheme = prepared.sites, prepared.request.recipe.scheme.weights
    rows = sum(site.weight.shape[site.rows] for site in sites)
    by_row = scheme is not None and scheme.granularity == "channel"
    return sum(site.weight.size for site in sites), rows if by_row else len(sites)
