"""A graph while it is quantized: ranges, codes, pairs, the file, and what is checked of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import quantkit
from quantkit.bundle import Check, LayerEntry
from quantkit.errors import GateError
from quantkit.pipeline.graph_prepared import Prepared, schemes
from quantkit.pipeline.progress import Progress

if TYPE_CHECKING:
    from quantkit.graph.placement import Placement
    from quantkit.graph.qdq import Codes, Range

MODEL, DATA = "model.onnx", "model.onnx.data"
# samples of one run
BATCH = 8
# samples that codes are solved on: each site runs all of them
SOLVING = 64
# what integer kernels may differ by from the pairs as they are written: codes that lie between two go either way
_RELOAD_LIMIT = 0.05
_INTEGER_SHARE = 0.95
# weights up to so many bytes stand in the file itself
_INLINE = 1 << 28


class Quantized:
    """A graph while it is quantized."""

    def __init__(self, prepared: Prepared, progress: Progress) -> None:
        from quantkit.export import _dynamic
        from quantkit.graph import placement, qdq, solve

        self.prepared, self.progress = prepared, progress
        self.weights, self.activations = schemes(prepared.request.recipe)
        model, sites = prepared.graph.model, prepared.sites
        feeds = list(prepared.calib.feeds(BATCH))
        self.sites = {site.name: site for site in sites}
        asked = prepared.request.target.build.get("onnxruntime", {}).get("weight_codes", "uint8")
        # sums of 7-bit weights never saturate, so the fastest kernel is exact
        kind: qdq.WeightType = "int8" if asked == "int8" or self.weights.format == "int7" else "uint8"
        self.placement: Placement = placement.NOWHERE
        self.ranges: dict[str, Range] = {}
        if not self.activations.dynamic:
            self.placement = placement.place(model, sites, self.sites)
            self.ranges = solve.ranges(
                model,
                self.placement,
                feeds,
                self.activations,
                report=lambda done, words: progress.at("ranges", done, words),
                total=len(feeds),
            )
        settings = next((step.settings for step in prepared.request.recipe.passes if step.name == "gptq"), None)

        def made(found: Mapping[str, Codes]) -> Any:
            if self.activations.dynamic:
                return _dynamic.insert(model, found, self.sites, self.weights, self.activations, weight_type=kind)
            return qdq.insert(model, self.placement, self.ranges, found, self.sites, weight_type=kind)

        self.codes = solve.solved(
            model,
            made,
            sites,
            feeds[: max(1, SOLVING // (prepared.calib.batch or BATCH))],
            self.weights,
            self.ranges,
            self.placement,
            **({} if settings is None else {name: getattr(settings, name) for name in ("damping", "shrink", "ridge")}),
            report=lambda done, words: progress.at("codes", done, words),
        )
        self.model = made(self.codes)

    def save(self, path: Path) -> None:
        """Write the graph, with its weights beside it."""
        import onnx_ir as ir

        self.model.producer_name, self.model.producer_version = "quantkit", quantkit.__version__
        for node in self.model.graph:
            node.metadata_props.clear()  # where in torch's source it came from: half of a small file
        apart = sum(value.const_value.nbytes for value in self.model.graph.initializers.values() if value.const_value)
        ir.save(self.model, path, external_data=DATA if apart > _INLINE else None)

    def checks(self, path: Path) -> list[Check]:
        """The file, reloaded and run by integer kernels, against its pairs as they are written. Raises GateError."""
        from quantkit.graph.run import Runner

        feed = self.prepared.calib.first(BATCH)
        written, loaded = Runner(self.model, optimised=False)(feed), Runner(path)(feed)
        apart = max(
            float(np.linalg.norm(loaded[name] - expected) / (np.linalg.norm(expected) or 1.0))
            for name, expected in written.items()
            if expected.dtype.kind == "f"
        )
        check = Check(name="reload.onnxruntime", value=apart, limit=_RELOAD_LIMIT, ok=apart <= _RELOAD_LIMIT)
        if not check.ok:
            raise GateError(
                "check-failed",
                where="onnxruntime",
                value=f"{check.name} is {apart:.3g}",
                rule=f"at most {_RELOAD_LIMIT}",
                remedy="the export is not what was decided on; nothing was delivered. Please report it",
            )
        return [check, self._kernels(path)]

    def _kernels(self, path: Path) -> Check:
        """Whether ONNX Runtime multiplies what was quantized in integers. Raises GateError where it does not."""
        import onnx_ir as ir

        from quantkit.graph import integer
        from quantkit.graph.qdq import stem_of
        from quantkit.runtimes._onnx_open import write_optimized

        macs = self.prepared.cost.macs
        sites = [
            integer.Site(site.name, f"{stem_of(site)}.codes", float(macs[site.name]), site.output)
            for site in self.prepared.sites
        ]
        with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as place:
            write_optimized(path, Path(place) / MODEL)
            found = integer.found(ir.load(Path(place) / MODEL), sites)
        where = "; ".join(f"{name} runs as {kind}" for name, kind in list(found.floating.items())[:3])
        ok = found.share >= _INTEGER_SHARE and not found.floating
        check = Check(name="integer.macs", value=found.share, limit=_INTEGER_SHARE, ok=ok, where=where)
        if not ok:
            raise GateError(
                "check-failed",
                where=where or path.name,
                value=f"{found.share:.1%} of the multiply-accumulates run in integers",
                rule=f"what is quantized is multiplied in integers, at least {_INTEGER_SHARE:.0%} of all",
                remedy="keep these layers in floats: --set 'keep=[NAME]'",
            )
        return check

    def layers(self) -> list[LayerEntry]:
        """What the manifest says of each quantized product."""
        from quantkit.export._dynamic import activations_of

        found = []
        for name, codes in self.codes.items():
            site = self.sites[name]
            matrix = site.matrix()
            stored = 8 * codes.codes.size + 32 * codes.scale.size
            error = float(np.square(codes.values() - matrix).sum() / (np.square(matrix).sum() or 1.0))
            own = self.ranges.get(self.placement.same.get(site.input, site.input))
            inputs = activations_of(site, self.activations) if own is None else self.activations
            found.append(
                LayerEntry(
                    name=name,
                    shape=list(matrix.shape),
                    scheme=self.weights.model_dump(mode="json", exclude_none=True),
                    bits_per_weight=stored / matrix.size,
                    error=error,
                    activations=inputs.model_dump(mode="json", exclude_none=True),
                    input_scale=None if own is None else own.scale,
                )
            )
        return found
