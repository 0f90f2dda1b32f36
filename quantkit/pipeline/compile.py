"""Model + recipe + target -> bundle: the order of things, of transformers and of float graphs alike.

    open -> refuse -> prove -> [unit: solve -> commit] -> export -> reload and check -> engines -> score -> gates
         -> speed -> verdict -> page -> bundle

Everything that can be refused is refused before the first unit is touched. Every step that took time is committed, so
a killed compile goes on where it was and ends with the same `content_sha256`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit import machine
from quantkit.bundle import Build, Bundle, Check, Decision, content_sha256, inventory, stopping_when_full
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.measurement.rows import Row, write_rows
from quantkit.pipeline.estimate import demand_disk, line
from quantkit.pipeline.gates import demand, judge, refuse, warnings
from quantkit.pipeline.graphs.exported_module import takes_graph
from quantkit.pipeline.manifest import manifest_of, with_documents
from quantkit.pipeline.progress import Progress, Stage, Stages
from quantkit.pipeline.request import Request
from quantkit.pipeline.resume import given_back, stopping_when_interrupted
from quantkit.pipeline.subject import Subject, Work
from quantkit.pipeline.verdict import decide


@dataclass(frozen=True)
class Compiled:
    """What a compile yields.

    Args:
        bundle: on disk.
        rows: its measurements.
        seconds: `quantize_cpu` (processor seconds from calibration to packed weights) and `total` (wall clock).
        memory_peak_bytes: the most that this process had resident.
        warnings: what a reader must know about the figures.
        stages: what each took, in order; of a resume, what is done now.
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
    stages = Stages("open")
    if request.out is not None and not request.resume:
        Build.demand_free(request.out)
    subject = opened(request)
    expected = subject.expected
    for said in (line(expected), *warnings(subject.decisions)):
        progress.note(said)
    progress.plan(subject.stages)
    if request.strict:
        refuse(subject.decisions)
    if not request.resume:
        demand_disk(expected, subject.out)
    build = Build.open(subject.out, subject.fingerprint(), resume=request.resume)
    if build.dropped:
        progress.note(build.dropped)
    if build.finished is not None:
        rows, notes = given_back(build.finished, subject)
        seconds = {"quantize_cpu": None, "total": 0.0}
        return Compiled(build.finished, rows, seconds, machine.peak_bytes(), [*subject.notes, *notes])
    with (
        stopping_when_interrupted(build, subject.out),
        build,
        stopping_when_full(build.folder),
        subject.device.strict.arithmetic(),
    ):
        return _compiled(subject, build, progress, stages)


def opened(request: Request, *, dry: bool = False) -> Subject:
    """The subject of a compile, opened and found good; nothing is written.

    Args:
        dry: whether it is only looked at: a model then writes no text to be calibrated on.

    Raises:
        InputError: whatever would make the compile fail later.
    """
    if takes_graph(request.model):
        from quantkit.pipeline.graphs.prepared import prepare
        from quantkit.pipeline.graphs.subject import GraphSubject

        return GraphSubject(prepare(request))
    from quantkit.pipeline.blocks import prepared
    from quantkit.pipeline.blocks.subject import TransformerSubject

    return TransformerSubject(prepared.prepare(request, write=not dry))


@dataclass(frozen=True)
class Made:
    """A bundle's content before it is scored.

    Args:
        decisions: taken on the way.
        checks: of the exports, all of which hold, and of engines.
        engines: hashes of what was compiled, by path in the bundle.
    """

    decisions: Sequence[Decision]
    checks: Sequence[Check]
    engines: Mapping[str, str]


def make(work: Work, stages: Stages, *, strict: bool = False) -> Made:
    """The first half: units solved, exports written, checked and compiled; nothing is scored yet.

    Raises:
        GateError: `check-failed`; with `strict`, a decision was taken.
    """
    decisions = work.solve()
    if strict:
        refuse(decisions)
    stages.begin("export")
    decisions += work.export()
    stages.begin("check")
    checks, unchecked = work.check()
    decisions += unchecked
    if strict:
        refuse(decisions)
    engines = work.engines()
    return Made([*decisions, *engines.decisions], [*checks, *engines.checks], engines.hashes)


def _compiled(subject: Subject, build: Build, progress: Progress, stages: Stages) -> Compiled:
    request, bundle = subject.request, build.bundle
    work = subject.work(build, progress, stages)
    proofs = work.prove()
    made = make(work, stages, strict=request.strict)
    files = inventory(bundle)
    content = content_sha256(files)
    stages.begin("score")
    scores = work.score(content, files, made.engines)
    demand(scores.checks, "the figures are not those of the export; nothing was delivered. Please report it")
    judged, unjudged = judge(request.recipe.gates, scores.rows, request.gates_asked)
    if request.strict:
        refuse(unjudged)
    timed, untimed = work.time(content)
    stages.begin("finish")
    subject.demand_unchanged()
    rows, layers = [*scores.rows, *timed], work.layers
    notes = [*subject.notes, *warnings([*subject.decisions, *unjudged])]
    decisions = [*subject.decisions, *made.decisions, *scores.decisions, *unjudged, *untimed]
    write_rows(bundle / MEASUREMENTS, rows)
    manifest = manifest_of(
        request,
        *subject.entries(),
        bundle,
        decisions=decisions,
        layers=layers,
        checks=[*proofs, *made.checks, *scores.checks, *judged],
        subject=content,
        weights=work.weights(decisions),
        compiled_on=subject.device.as_dict(),
    )
    found = decide(rows, manifest.checks, layers, request.target, manifest.recipe.get("export") or [])
    manifest = manifest.model_copy(update={"verdict": found})
    manifest = with_documents(manifest, rows, notes, bundle)
    finished = build.finish(manifest)
    ended = stages.end()
    seconds = {"quantize_cpu": work.quantize_cpu, "total": sum(stage.seconds for stage in ended)}
    return Compiled(finished, rows, seconds, machine.peak_bytes(), notes, ended)
