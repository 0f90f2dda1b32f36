"""A transformer in torch, or in an engine: the device's own torch runs the float model beside it, block by block.

torch's float model is the source itself: nothing is exported for it. Of a bundle goes there what its runtime reads; of
an engine the one that is for the device's GPU, with the hashes that the manifest has of it. Nothing else is executed.

A checkpoint is scored on the device's processor, as it is on this one. Its steps are timed on quantkit's own kernels,
where the device has a GPU, and a torch and Triton that use it; the choices that `quantkit tax` has recorded go along.
"""

from __future__ import annotations

import contextlib
import json
from math import prod
from pathlib import Path

from quantkit import limits
from quantkit.bundle import Bundle, Decision
from quantkit.bundle.disk import walk
from quantkit.devices import job as jobs
from quantkit.devices.asked.room import streamed
from quantkit.devices.probed import Probed
from quantkit.devices.sides.model import TransformerSides
from quantkit.errors import InputError
from quantkit.kernels.dispatch import FILE
from quantkit.measurement.size import saved_bytes
from quantkit.measurement.timing.shapes import TimingPlan
from quantkit.model.source.open import Source
from quantkit.pipeline.measure import MeasuredAgainst, context_of, fitting
from quantkit.recipe import Recipe
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import choose, descriptions, verified
from quantkit.runtimes.tensorrt.library import InstalledLibrary

# bytes of a weight of the float model, as a GPU's times have it
_WIDTH = 2


class StreamedSides(TransformerSides):
    """See the module.

    Args:
        about: the device, which an engine has to be for.
        name: of it.

    Raises:
        InputError: `bundle-without-checkpoint`, `-engine`; `gpu-absent`, `runtime-not-here`, `engine-foreign`.
    """

    # that times are set against
    floats, form = "torch", "bfloat16"
    ways = frozenset({""})

    def __init__(
        self,
        bundle: Bundle,
        found: MeasuredAgainst,
        runtime: str,
        calibration: str | None,
        decisions: list[Decision],
        about: Probed | None,
        name: str,
    ) -> None:
        runner = load_runtime(runtime)
        folder = runner.folder(bundle)
        decodes = bundle.manifest.model.kind == "decoder"
        self._about, self._name, self.scored_on_gpu = about, name, runner.engines
        self._own = {path.relative_to(bundle.path).as_posix(): path for path in walk(folder)}
        if runner.engines:
            assert about is not None, "an engine is for one GPU"
            self._own = _engine(bundle, runtime, about, name)
            hashes = verified(bundle)
            self.built = {place: hashes[path] for place, path in self._own.items()}
            self.saved = saved_bytes(bundle.manifest.layers)
            self.timed = decodes
        else:
            # a device without a GPU times nothing in torch, as this machine does not
            self.untimed = about.why_no_kernels() if decodes and about is not None and about.gpus else ""
            self.timed = decodes and about is not None and not about.why_no_kernels()
        if self.timed and not runner.engines:
            self.layers = bundle.manifest.layers
            recorded = bundle.path / FILE
            self._own |= {FILE: recorded} if recorded.is_file() else {}
        self.on_gpu = runner.engines or self.timed
        super().__init__(bundle, found, runtime, calibration, decisions)

    @property
    def _source(self) -> Source:
        assert self.found.stream is not None, "there is nothing to score against without torch"
        return self.found.stream.source

    def files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """See `DeviceSides`; what an encoder is held against stays here."""
        theirs = self._source.files() if self.of == "decoder" else []
        return self._own, {path.relative_to(self._source.path).as_posix(): path for path in theirs}

    def needs(self, plan: TimingPlan | None) -> tuple[list[Path], float]:
        """See `DeviceSides`. Raises InputError `out-of-memory`, the GPU's; `baseline-needed`."""
        assert self.tokens is not None
        recipe, (sequences, length) = Recipe.done(self.bundle.manifest.recipe), self.tokens.ids.shape
        need = streamed(self._source.path, recipe, sequences, length)
        if self._about is None or not (self.scored_on_gpu or (self.on_gpu and plan is not None)):
            return [], need
        held, floats = float(sum(path.stat().st_size for path in self._own.values())), 0.0
        if plan is not None:
            source = self.found.floats_in_torch().source
            floats = float(_WIDTH * sum(prod(entry.shape) for entry in source.weights.entries.values()))
        self._about.demand_gpu(held + floats, self._name, "engine" if self.scored_on_gpu else "bundle")
        # a GPU without memory of its own takes the machine's; into any, the float model goes by way of that
        return [], max(need, floats) if self._about.gpus[0].memory else need + held + floats

    def scoring(self, ours: jobs.PlacedModel, theirs: jobs.PlacedModel, data: str) -> jobs.Work:
        """See `DeviceSides`."""
        beside = theirs if self.of == "decoder" else None
        how = self.pooled()
        return jobs.ScoreStreamed(of=self.of, ours=ours, theirs=beside, runtime=self.runtime, data=data, **how)

    def fitting(self, plan: TimingPlan) -> TimingPlan:
        """See `DeviceSides`."""
        return fitting(plan, self._capacity(), self.of)

    def _capacity(self) -> int:
        """Tokens that an engine's cache holds, as its description has it; else the model's positions."""
        with contextlib.suppress(StopIteration, OSError, ValueError, LookupError, TypeError):
            record = next(path for place, path in self._own.items() if place.endswith(".json") and self.scored_on_gpu)
            profiles = json.loads(limits.read(record))["profiles"]
            return max(int(each["inputs"]["attention_mask"][2][1]) for each in profiles)
        return context_of(self._source.path)


def _engine(bundle: Bundle, runtime: str, about: Probed, name: str) -> dict[str, Path]:
    """The engine for a device's GPU and library, and what describes it: place in the bundle -> file."""
    about.demand_gpu(0.0, name)
    package = runtime.replace("_", "-")
    about.demand_own([package], name, f"an engine is run by {runtime} there")
    verified(bundle)
    library = InstalledLibrary(runtime, about.packages[package])  # type: ignore[arg-type]
    try:
        path = choose(bundle.path, descriptions(bundle.path), library, about.gpus[0].model_dump())
    except InputError as problem:
        fields = problem.as_dict() | {"remedy": f"{problem.remedy} --on {name}"}
        raise InputError(**fields) from None
    return {each.relative_to(bundle.path).as_posix(): each for each in (path, path.with_suffix(".json"))}
