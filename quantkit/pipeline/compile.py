"""Model + recipe + target -> bundle: the order of things.

    validate -> open -> lay out -> prove -> [block: passes -> commit] -> export -> reload and check -> score -> gates
             -> speed -> verdict -> page -> bundle

Everything that can be refused is refused before the first block is touched. Every step that took time is committed, so
a killed compile goes on where it was and ends with the same `content_sha256`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine, plugins
from quantkit.bundle import (
    Build,
    Bundle,
    Check,
    Decision,
    LayerEntry,
    content_sha256,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.graph.open import is_graph
from quantkit.measurement.rows import Row, write_rows
from quantkit.measurement.size import folder_of
from quantkit.model.source.alias import ALIASES, Alias, materialize
from quantkit.passes import NOTE, decision
from quantkit.pipeline.blocks.accounting import account
from quantkit.pipeline.blocks.confirm import KL, OUTPUT
from quantkit.pipeline.blocks.prepared import Prepared, fingerprint, prepare
from quantkit.pipeline.blocks.quantize import quantize, results
from quantkit.pipeline.blocks.score import score_exports, unscored
from quantkit.pipeline.checks import demand
from quantkit.pipeline.estimate import demand_disk, estimate, head_size, line, times
from quantkit.pipeline.finished import engine
from quantkit.pipeline.finished.inspect_engine import of_exports
from quantkit.pipeline.gates import judge, warnings
from quantkit.pipeline.graphs.exported_module import REF
from quantkit.pipeline.manifest import entries_of, manifest_of, with_documents
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request
from quantkit.pipeline.resume import given_back, stopping_when_interrupted
from quantkit.pipeline.stages import Stage, Stages
from quantkit.pipeline.strict import refuse
from quantkit.pipeline.verdict import decide, try_to_time
from quantkit.planning.bound import efficiency
from quantkit.planning.compiling.memory import WHOLE
from quantkit.planning.model.assigned import takes_head

if TYPE_CHECKING:
    from quantkit.pipeline.graphs.prepared import Prepared as PreparedGraph


# a checkpoint whose tensors were compared, but no logits
UNRUN = "reload-not-run"


@dataclass(frozen=True)
class Compiled:
    """What a compile yields.

    Args:
        bundle: on disk.
        rows: its measurements.
        seconds: `quantize_cpu` (processor seconds from calibration to packed weights) and `total` (wall clock).
        memory_peak_bytes: the most that this process had resident.
        warnings: what a reader must know about the figures.
        stages: what each took, in order; of a resume, what is done now. None of a float graph's.
    """

    bundle: Bundle
    rows: list[Row]
    seconds: Mapping[str, float | None]
    memory_peak_bytes: int
    warnings: list[str]
    stages: list[Stage] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        """What was done otherwise than asked."""
        return self.bundle.manifest.decisions

    def as_dict(self) -> dict[str, Any]:
        """`result` of the `--json` envelope."""
        manifest = self.bundle.manifest
        return {
            "bundle": str(self.bundle.path),
            "content_sha256": manifest.content_sha256,
            "state": manifest.state,
            "verdict": manifest.verdict.model_dump(mode="json") if manifest.verdict else None,
            "measurements": [row.as_dict() for row in self.rows],
            "checks": [check.model_dump(mode="json") for check in manifest.checks],
            "weights": [entry.model_dump(mode="json") for entry in manifest.weights],
            "seconds": dict(self.seconds),
            "stages": [stage.as_dict() for stage in self.stages],
            "memory_peak_bytes": self.memory_peak_bytes,
        }


def compile_model(request: Request, progress: Progress | None = None) -> Compiled:
    """Compile a model into a bundle.

    Raises:
        InputError: something is not what it has to be.
        GateError: a check failed (nothing is delivered), or `--strict` and a decision was taken.
        Stopped: interrupted or disk full; what is done is kept.
    """
    progress = progress or Progress()
    if takes_graph(request.model):
        return _compile_graph(request, progress)
    stages = Stages("open")
    prepared = prepare(request)
    expected = estimate(prepared)
    for said in (line(expected), *warnings(prepared.decisions)):
        progress.note(said)
    progress.plan(expected.seconds)
    if request.strict:
        refuse(prepared.decisions)
    if not request.resume:
        demand_disk(expected, prepared.out)
    build = Build.open(prepared.out, fingerprint(prepared), resume=request.resume)
    if build.finished is not None:
        return _finished(build.finished, prepared)
    with stopping_when_interrupted(build, prepared.out), build:
        return Compilation(prepared, build, progress, stages, int(expected.peak)).run()


def takes_graph(model: str) -> bool:
    """Whether a model is compiled as a float ONNX graph: a file of one, or a shipped network."""
    alias = ALIASES.get(model)
    return is_graph(model) or (alias is not None and alias.kind == "network")


def prepare_graph(request: Request) -> PreparedGraph:
    """What is no transformers model, opened and found good: a float ONNX graph. Raises InputError."""
    from quantkit.pipeline.graphs.prepared import prepare

    return prepare(request, *located(request))


def _compile_graph(request: Request, progress: Progress) -> Compiled:
    from quantkit.pipeline.graphs.compile import compile_graph

    path, ref, name, alias = located(request)
    found = compile_graph(request, path, ref, name, progress, alias)
    return Compiled(found.bundle, found.rows, found.seconds, machine.peak_bytes(), found.warnings)


def located(request: Request) -> tuple[Path, str, str, Alias | None]:
    """(the file of a graph, what a manifest calls it, what a bundle is named after, its alias)."""
    alias = ALIASES.get(request.model)
    if alias is not None:
        return materialize(alias) / "model.onnx", f"alias:{alias.name}", alias.name, alias
    path = Path(request.model).expanduser()
    ref = f"{REF}{request.module}" if request.module else f"path:{path.name}"
    return path, ref, request.module or path.stem, None


def _finished(bundle: Bundle, prepared: Prepared) -> Compiled:
    """A resume of what had been finished already."""
    ids = prepared.calibration.sha256 if prepared.calibration else None
    rows, notes = given_back(bundle, prepared.request, source=prepared.source.sha256, calibration=ids)
    seconds = {"quantize_cpu": None, "total": 0.0}
    return Compiled(bundle, rows, seconds, machine.peak_bytes(), [*prepared.source.notes, *notes])


@dataclass(frozen=True)
class Made:
    """A bundle's content before it is scored.

    Args:
        decisions: so far.
        layers: what was quantized.
        checks: of the exports, all of which hold, and of engines.
        built: hashes of engines by path in the bundle.
    """

    decisions: Sequence[Decision]
    layers: Sequence[LayerEntry]
    checks: Sequence[Check]
    built: Mapping[str, str]


class Compilation:
    """The stages of one compile, in order; the state between them is what is on disk."""

    def __init__(
        self, prepared: Prepared, build: Build, progress: Progress, stages: Stages, expected_peak: int = 0
    ) -> None:
        self.prepared = prepared
        self.build = build
        self.progress = progress
        self.stages = stages
        self.expected_peak = expected_peak
        self.quantize_cpu = 0.0

    def run(self) -> Compiled:
        """All stages."""
        prepared, request = self.prepared, self.prepared.request
        with stopping_when_full(self.build.folder):
            self.stages.begin("prove")
            proved = self._prove()
            made = self.made()
            decisions, layers, checks = list(made.decisions), list(made.layers), [proved, *made.checks]
            files = inventory(self.build.bundle)
            subject = content_sha256(files)
            self.stages.begin("score")
            whole = self._fitting_blocks(1) == len(prepared.stream.block_names)
            rows, confirmed = score_exports(
                prepared,
                self.build,
                self.progress,
                subject=subject,
                layers=layers,
                files=files,
                built=made.built,
                whole=whole,
            )
            demand(confirmed, "the figures are not those of the export; nothing was delivered. Please report it")
            checks += confirmed
            checkpoint = any(step.name == "checkpoint" for step in request.recipe.export)
            if not whole:
                reason = "plain transformers does not hold the whole model in the memory of this compile"
                decisions.append(decision("score", NOTE, "score", f"not confirmed outside of the stream: {reason}"))
            elif checkpoint and not {KL, OUTPUT} & {check.name for check in confirmed}:
                reason = "as transformers loads the checkpoint, it leaves out some of what is quantized"
                decisions.append(decision("score", NOTE, "score", f"of the original alone confirmed: {reason}"))
            judged, unjudged = judge(request.recipe.gates, rows, request.gates_asked)
            if request.strict:
                refuse(unjudged)
            notes = [*prepared.source.notes, *warnings([*prepared.decisions, *unjudged])]
            timed, untimed = self._speed(subject, layers)
            efficiency.keep([row.as_dict() for row in timed])
            rows += timed
            self.stages.begin("finish")
            decisions += [*unscored(request.recipe.export, self.build.bundle), *unjudged, *untimed]
            checks += judged
            write_rows(self.build.bundle / MEASUREMENTS, rows)
            manifest = manifest_of(
                request,
                *entries_of(prepared),
                self.build.bundle,
                decisions=decisions,
                layers=layers,
                checks=checks,
                subject=subject,
                weights=account(
                    prepared.stream, {each.name for each in layers}, decisions, head=takes_head(request.recipe)
                ),
            )
            manifest = manifest.model_copy(update={"verdict": decide(rows, checks, layers, request.target)})
            manifest = with_documents(manifest, rows, notes, self.build.bundle)
        bundle = self.build.finish(manifest)
        stages = self.stages.end()
        seconds = {"quantize_cpu": self.quantize_cpu, "total": sum(stage.seconds for stage in stages)}
        return Compiled(bundle, rows, seconds, machine.peak_bytes(), notes, stages)

    def made(self) -> Made:
        """The first half: blocks through the passes, exports, their checks, and engines; nothing is scored yet.

        Raises:
            GateError: `check-failed`.
        """
        prepared, request = self.prepared, self.prepared.request
        if prepared.steps or prepared.calibration is not None:
            self.stages.begin("quantize")
            quantize(prepared, self.build, self.progress)
        records = [record for key, record in self.build.done().items() if key.startswith(("block-", "head"))]
        taken = [Decision.model_validate(x) for record in records for x in record.get("decisions", [])]
        decisions = [*prepared.decisions, *taken]
        layers = [LayerEntry.model_validate(x) for record in records for x in record["layers"]]
        self.quantize_cpu = prepared.cpu_seconds + sum(record["cpu_seconds"] for record in records)
        if request.strict:
            refuse(decisions)
        self.stages.begin("export")
        decisions += self._export()
        self.stages.begin("check")
        checks = self._check()
        decisions += _about_reload(checks)
        if request.strict:
            refuse(decisions)
        built = self._build_engines()
        decisions += engine.notes(self.build.bundle, built)
        looked = of_exports(request.recipe.export, self.build.bundle, layers, built, strict=request.strict)
        decisions += [taken for each in looked for taken in each.decisions()]
        checks += [each.check for each in looked]
        return Made(decisions, layers, checks, built)

    def _prove(self) -> Check:
        """That the stream, which calibrates and scores, is the model: before the first block is touched."""
        from quantkit.model.streaming import own_forward

        self.progress.at("prove", 0.0, "the stream against the model's own forward")
        prepared = self.prepared
        original = prepared.unchanged()
        check = own_forward.demand_equal(original, prepared.scoring.ids, self._fitting_blocks(1))
        machine.let_go()
        self.progress.at("prove", 1.0)
        return check

    def _fitting_blocks(self, copies: int) -> int:
        """How many blocks can be in memory at once, in so many copies, without raising the peak that was reached or is
        expected; all of a small model.

        At least one: memory then grows with the size of a block, never with their number.
        """
        import psutil

        stream, weights = self.prepared.stream, self.prepared.source.weights
        blocks = [sum(value.numel() for value in block.parameters()) for block in stream.blocks]
        outside = sum(math.prod(weights.entries[name].shape) for name in {stream.files[x] for x in stream.rest_names()})
        used: int = psutil.Process().memory_info().rss
        small = used + min(WHOLE, machine.memory_limit() // 4, machine.memory_available() // 2)
        free = max(self.expected_peak, machine.peak_bytes(), small) - used
        # what lies outside the blocks comes along, and logits of a few tokens
        room = free // (4 * copies) - max(outside, 2 * head_size(self.prepared))
        return max(1, sum(together <= room for together in itertools.accumulate(blocks)))

    def _export(self) -> list[Decision]:
        stored = results(self.prepared, self.build)
        taken: list[Decision] = []
        for number, step in enumerate(self.prepared.request.recipe.export):
            self.progress.at("export", number / len(self.prepared.request.recipe.export), step.name)
            before = time.process_time()
            exporter = plugins.load("export", step.name)
            taken += (
                exporter.write(self.build.bundle, self.prepared.source, self.prepared.stream, stored, step.options)
                or []
            )
            if step.name == "checkpoint":
                self.quantize_cpu += time.process_time() - before
        self.progress.at("export", 1.0)
        return taken

    def _check(self) -> list[Check]:
        """Load every export again in somebody else's library and compare; a mismatch ends the compile."""
        checks: list[Check] = []
        stored = results(self.prepared, self.build)
        for step in self.prepared.request.recipe.export:
            self.progress.at("check", 0.0, f"reloading the {step.name}")
            checks += plugins.load("export", step.name).check(
                self.build.bundle,
                self.prepared.source,
                self.prepared.stream,
                stored,
                step.options,
                blocks=self._fitting_blocks(2),
            )
        self.progress.at("check", 1.0)
        demand(checks, "the export is not what was decided on; nothing was delivered. Please report it")
        return checks

    def _build_engines(self) -> dict[str, str]:
        """What is compiled from a checked export, where one is: its hashes by path in the bundle."""
        made: dict[str, str] = {}
        for step in self.prepared.request.recipe.export:
            exporter = plugins.load("export", step.name)
            if hasattr(exporter, "build"):
                self.stages.begin("build")
                made |= exporter.build(
                    self.build.bundle, step.options, lambda share, words: self.progress.at("build", share, words)
                )
        return made

    def _speed(self, subject: str, layers: list[LayerEntry]) -> tuple[list[Row], list[Decision]]:
        if not times(self.prepared):
            return [], self._untimed()
        self.stages.begin("speed")
        self.progress.at("speed", 0.0, "the float model as ONNX, for comparison")
        step = next(step for step in self.prepared.request.recipe.export if step.name == "onnx")
        return try_to_time(
            self.build.bundle / folder_of("onnx"),
            subject,
            layers,
            self.prepared.original,
            step.options,
            lambda share, words: self.progress.at("speed", share, words),
        )

    def _untimed(self) -> list[Decision]:
        """Why an ONNX graph that could have been timed was not, where nobody asked for that."""
        request = self.prepared.request
        exported = any(step.name == "onnx" for step in request.recipe.export)
        if not (request.speed and exported and self.prepared.layers.schemes):
            return []
        return [decision("measure", NOTE, "speed", f"target {request.target.name} is another machine")]


def _about_reload(checks: Sequence[Check]) -> list[Decision]:
    """That what was written was not run, where it cannot be in the memory that there is."""
    from quantkit.export.checkpoint.reload import APART

    if not any(check.name == APART for check in checks):
        return []
    reason = (
        "its class makes no model of its first blocks alone, and there is no room for all of it: its tensors were "
        "compared, and no logits"
    )
    return [decision("check", UNRUN, "model/", reason)]
