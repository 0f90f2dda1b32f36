"""A transformer as the subject of a compile: blocks through the passes, each committed before the next."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import (
    Build,
    Bundle,
    CalibrationEntry,
    Check,
    Decision,
    LayerEntry,
    ModelEntry,
    SourceEntry,
    WeightsEntry,
)
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.accuracy.purpose import TextResults
from quantkit.measurement.rows import Row
from quantkit.model.sizes.assigned import takes_head
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines as engine
from quantkit.pipeline.blocks.layers import account
from quantkit.pipeline.blocks.opened import Prepared, fingerprint
from quantkit.pipeline.blocks.quantize import quantize, results
from quantkit.pipeline.blocks.score import KL, OUTPUT, original_of, score_exports, unscored
from quantkit.pipeline.estimate import estimate, head_size, times
from quantkit.pipeline.gates import demand, refuse
from quantkit.pipeline.measure import quick_times
from quantkit.pipeline.progress import Progress, Stages
from quantkit.pipeline.request import Request, runs_here
from quantkit.pipeline.subject import Engines, Scores
from quantkit.planning import efficiency
from quantkit.planning.compiling import WHOLE, Compiling, timed
from quantkit.recipe import ExportStep
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.exporters.values import Values

# a checkpoint whose tensors were compared, but no logits
UNRUN = "reload-not-run"
# what is loaded lies in memory beside the files that it is read from, or beside what it is held against
_COPIES = 2


class TransformerSubject:
    """See `pipeline/subject.py`."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.request: Request = prepared.request
        self.out: Path = prepared.out
        self.decisions: list[Decision] = prepared.decisions
        self.notes: Sequence[str] = prepared.source.notes
        self.device = prepared.device

    @cached_property
    def expected(self) -> Compiling:
        """What the compile will take of memory and disk."""
        return estimate(self.prepared)

    @property
    def stages(self) -> Mapping[str, float]:
        """In order, with the number of their parts: blocks, or exports."""
        blocks, exports = len(self.prepared.stream.block_names), len(self.request.recipe.export)
        quantizes = bool(self.prepared.steps) or self.prepared.calibration is not None
        builds = any(load_exporter(step.name).builds for step in self.request.recipe.export)
        stages = {"open": 1.0, "prove": 1.0, "quantize": blocks * quantizes, "export": exports, "check": exports}
        stages |= {"build": blocks * builds, "score": blocks, "speed": blocks * times(self.prepared), "finish": 1.0}
        return {name: float(parts) for name, parts in stages.items() if parts}

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the bundle's content depends on."""
        return fingerprint(self.prepared)

    def demand_unchanged(self) -> None:
        """Of the folder."""
        self.prepared.source.demand_unchanged()

    def entries(self) -> tuple[ModelEntry, CalibrationEntry | None]:
        """The model, and what it is calibrated on, as a manifest lists them."""
        source, seen = self.prepared.source, self.prepared.calibration
        origin = SourceEntry(ref=source.ref, sha256=source.sha256, dtype=source.dtype, was=source.was)
        model = ModelEntry(name=source.name, kind=source.kind, source=origin)
        if seen is None:
            return model, None
        samples, length = seen.ids.shape
        return model, CalibrationEntry(
            set=seen.name,
            split=seen.split,
            ids_sha256=seen.sha256,
            samples=samples,
            tokens=length,
            begins=seen.begins,
            generated=seen.generated or None,
        )

    def planned(self) -> dict[str, Any]:
        """What the compile would do, as JSON."""
        from quantkit.pipeline.dry_run import planned

        return planned(self.prepared)

    def work(self, build: Build, progress: Progress, stages: Stages) -> BlocksWork:
        """The work on it, in a build."""
        return BlocksWork(self.prepared, build, progress, stages, self.expected)


class BlocksWork:
    """See `pipeline/subject.py`; the state between the steps is what is on disk.

    Args:
        prepared: what to compile.
        build: where it is committed.
        progress: told how far it is.
        stages: the stop watch.
        expected: what the compile takes.
    """

    def __init__(
        self, prepared: Prepared, build: Build, progress: Progress, stages: Stages, expected: Compiling
    ) -> None:
        self.prepared, self.build, self.progress, self.stages = prepared, build, progress, stages
        self.expected = expected
        self.layers: list[LayerEntry] = []
        self.quantize_cpu = 0.0

    def prove(self) -> list[Check]:
        """That the stream, which calibrates and scores, is the model: before the first block is touched."""
        from quantkit.model.streaming import own_forward

        self.stages.begin("prove")
        self.progress.at("prove", 0.0, "the stream against the model's own forward")
        original = self.prepared.unchanged()
        check = own_forward.demand_equal(original, self.prepared.scoring.ids, self._fitting_blocks())
        if original.source.kind == "encoder":
            self.prepared.decisions.extend(TextResults(original, self.prepared.scoring).decisions())
            if self.request.strict:
                refuse(self.prepared.decisions)
        machine.let_go()
        self.progress.at("prove", 1.0)
        return [check]

    def solve(self) -> list[Decision]:
        """Blocks through the passes, then what lies outside them."""
        prepared = self.prepared
        if prepared.steps or prepared.calibration is not None:
            self.stages.begin("quantize")
            with prepared.device.arithmetic():
                quantize(prepared, self.build, self.progress)
        done = sorted(self.build.done().items())  # blocks in their order, then the head
        records = [record for key, record in done if key.startswith(("block-", "head"))]
        self.layers = [LayerEntry.model_validate(each) for record in records for each in record["layers"]]
        self.quantize_cpu = prepared.cpu_seconds + sum(record["cpu_seconds"] for record in records)
        return [Decision.model_validate(each) for record in records for each in record.get("decisions", [])]

    def export(self) -> list[Decision]:
        """Every export, from what was committed."""
        steps, taken = self.request.recipe.export, list[Decision]()
        for number, step in enumerate(steps):
            self.progress.at("export", number / len(steps), step.name)
            before = time.process_time()
            exporter = load_exporter(step.name)
            taken += exporter.export(self.build.bundle / exporter.place, self._decided, step.settings) or []
            if exporter.stores == "tensors":
                self.quantize_cpu += time.process_time() - before
        self.progress.at("export", 1.0)
        return taken

    def check(self) -> tuple[list[Check], list[Decision]]:
        """Load every export again in somebody else's library and compare; a mismatch ends the compile."""
        checks: list[Check] = []
        for step in self.request.recipe.export:
            self.progress.at("check", 0.0, f"reloading the {step.name}")
            checks += load_exporter(step.name).check(
                self.build.bundle, self._decided, step.settings, blocks=self._fitting_blocks()
            )
        self.progress.at("check", 1.0)
        demand(checks, "the export is not what was decided on; nothing was delivered. Please report it")
        return checks, _about_reload(checks)

    def engines(self) -> Engines:
        """What is compiled from a checked export, and what it really does, where this machine can look."""
        made: dict[str, str] = {}
        request = self.request
        for step in request.recipe.export:
            exporter = load_exporter(step.name)
            if exporter.builds:
                self.stages.begin("build")
                made |= exporter.build(
                    self.build.bundle, step.settings, lambda share, words: self.progress.at("build", share, words)
                )
        notes = engine.notes(self.build.bundle, made)
        looked = engine.of_exports(request.recipe.export, self.build.bundle, self.layers, made, strict=request.strict)
        taken = [taken for each in looked for taken in each.decisions()]
        return Engines(made, [*notes, *taken], [each.check for each in looked])

    def score(self, bundle: Bundle, engines: Mapping[str, str]) -> Scores:
        """Every export in its own runtime, confirmed by plain transformers where the model fits."""
        prepared, exports = self.prepared, self.request.recipe.export
        whole = self._fitting_blocks() == len(prepared.stream.block_names)
        rows, confirmed = score_exports(prepared, self.build, self.progress, bundle, engines, whole=whole)
        reason, checkpoint = "", any(load_exporter(step.name).stores == "tensors" for step in exports)
        if not whole:
            why = "plain transformers does not hold the whole model in the memory of this compile"
            reason = f"not confirmed outside of the stream: {why}"
        elif checkpoint and not {KL, OUTPUT} & {each.name for each in confirmed}:
            why = "as transformers loads the checkpoint, it leaves out some of what is quantized"
            reason = f"of the original alone confirmed: {why}"
        said = [decision("score", NOTE, "score", reason)] if reason else []
        return Scores(rows, confirmed, [*said, *unscored(exports, bundle.path)])

    def time(self, bundle: Bundle) -> tuple[list[Row], list[Decision]]:
        """The ONNX graph, or the file, against the float model's, if there is one and it runs on this machine; what
        prevents it is a decision, not the end of the compile."""
        step = timed(self.request.recipe)
        if step is None or not times(self.prepared):
            return [], self._untimed(step)
        self.stages.begin("speed")
        runtime = reader(step.name, step.options)
        rows, untimed = quick_times(bundle, original_of(self.prepared), runtime, self.progress)
        efficiency.keep([row.as_dict() for row in rows])
        return rows, untimed

    def weights(self, decisions: Sequence[Decision]) -> list[WeightsEntry]:
        """Every tensor of the source, accounted for."""
        names = {each.name for each in self.layers}
        return account(self.prepared.stream, names, decisions, head=takes_head(self.request.recipe))

    @property
    def request(self) -> Request:
        """As it is compiled."""
        return self.prepared.request

    @cached_property
    def _decided(self) -> Values:
        """What was committed, as exporters take it."""
        from quantkit.exporters.values import Values

        prepared = self.prepared
        return Values.of_results(prepared.source, prepared.on_processor(), results(prepared, self.build))

    def _fitting_blocks(self) -> int:
        """How many blocks plain transformers may have in memory at once: all of a small model, else as many as the
        rest of the compile takes room for.

        Sizes say that, and what is free but for this process: what it had in memory before is no matter. At least one:
        memory then grows with the size of a block, never with their number.
        """
        import psutil

        stream, weights = self.prepared.stream, self.prepared.source.weights
        blocks = [sum(value.numel() for value in block.parameters()) for block in stream.blocks]
        outside = sum(math.prod(weights.entries[name].shape) for name in {stream.files[x] for x in stream.rest_names()})
        begun, resident = self.expected.memory.get("open", 0.0), int(psutil.Process().memory_info().rss)
        free = machine.memory_available() + resident - begun
        if 4 * (sum(blocks) + outside) <= min(WHOLE, machine.memory_limit() // 4, free / 2):
            return len(blocks)
        # what lies outside the blocks comes along, and logits of a few tokens
        room = min(self.expected.peak - begun, free) // (4 * _COPIES) - max(outside, 2 * head_size(self.prepared))
        return max(1, sum(together <= room for together in itertools.accumulate(blocks)))

    def _untimed(self, step: ExportStep | None) -> list[Decision]:
        """Why an export that could have been timed was not, where nobody asked for that."""
        request = self.request
        if not (request.speed and step is not None and self.prepared.layers.schemes):
            return []
        reason = f"target {request.target.name} is another machine"
        if runs_here(request.target):
            reason = str(load_runtime(reader(step.name, step.options)).why_not_here())
        return [decision("measure", NOTE, "speed", reason)]


def _about_reload(checks: Sequence[Check]) -> list[Decision]:
    """That what was written was not run, where it cannot be in the memory that there is."""
    from quantkit.exporters.checkpoint.reload import APART

    if not any(check.name == APART for check in checks):
        return []
    reason = (
        "its class makes no model of its first blocks alone, and there is no room for all of it: its tensors were "
        "compared, and no logits"
    )
    return [decision("check", UNRUN, "model/", reason)]
