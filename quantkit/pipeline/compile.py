"""Model + recipe + target -> bundle: the order of things, of transformers and of float graphs alike.

    open -> refuse -> prove -> [unit: solve -> commit] -> export -> reload and check -> engines
         -> measure: score -> gates -> measure: speed -> verdict -> page -> bundle

Everything that can be refused is refused before the first unit is touched. Every step that took time is committed, so
a killed compile goes on where it was and ends with the same `content_sha256`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import (
    Build,
    Bundle,
    Check,
    CodeEntry,
    Decision,
    FileEntry,
    LayerEntry,
    Manifest,
    content_sha256,
    exists_already,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import Stopped
from quantkit.measurement.engine_layers import NAME
from quantkit.measurement.rows import Row, write_rows
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.estimate import demand_disk, line
from quantkit.pipeline.gates import demand, judge, refuse, warnings
from quantkit.pipeline.progress import Progress, Stage, Stages
from quantkit.pipeline.request import Request, demand_model, takes_graph
from quantkit.pipeline.subject import Subject, Work
from quantkit.pipeline.verdict import decide, with_documents
from quantkit.report.kit import words


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


def asked(
    model: str,
    *,
    recipe: str = "awq-int4",
    changes: Sequence[str] = (),
    imatrix: Path | None = None,
    **how: Any,
) -> Request:
    """Read and check all that is asked of a compile, before the model is opened.

    Args:
        imatrix: an importance matrix that `rtn` weighs errors by.
        how: see `Request.of`.

    Raises:
        InputError: of `Request.of`, `demand_model` and `weighed_by`.
    """
    weighing: Sequence[str] = ()
    weighed: tuple[Decision, ...] = ()
    if imatrix is not None:
        from quantkit.pipeline.imatrix import weighed_by

        weighing, weighed = weighed_by(imatrix, recipe, changes)
    request = replace(Request.of(model, recipe=recipe, changes=[*changes, *weighing], **how), taken=weighed)
    demand_model(model)
    return request


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
    request = subject.request
    work = subject.work(build, progress, stages)
    proofs = work.prove()
    made = make(work, stages, strict=request.strict)
    decisions, checks, layers = [*subject.decisions, *made.decisions], [*proofs, *made.checks], work.layers
    files = inventory(build.bundle)
    bundle = Bundle(build.bundle, _manifest(subject, files, layers, decisions, checks))
    stages.begin("score")
    scores = work.score(bundle, made.engines)
    demand(scores.checks, "the figures are not those of the export; nothing was delivered. Please report it")
    judged, unjudged = judge(request.recipe.gates, scores.rows, request.gates_asked)
    if request.strict:
        refuse(unjudged)
    timed, untimed = work.time(bundle)
    stages.begin("finish")
    subject.demand_unchanged()
    rows = [*scores.rows, *timed]
    notes = [*subject.notes, *warnings([*subject.decisions, *unjudged])]
    decisions += [*scores.decisions, *unjudged, *untimed]
    checks += [*scores.checks, *judged]
    write_rows(bundle.path / MEASUREMENTS, rows)
    manifest = bundle.manifest.model_copy(
        update={
            "decisions": decisions,
            "checks": checks,
            "state": _state(checks),
            "weights": work.weights(decisions),
            "files": inventory(bundle.path),
            "verdict": decide(rows, checks, layers, request.target, bundle.manifest.recipe.get("export") or []),
        }
    )
    finished = build.finish(with_documents(manifest, rows, notes, bundle.path))
    ended = stages.end()
    seconds = {"quantize_cpu": work.quantize_cpu, "total": sum(stage.seconds for stage in ended)}
    return Compiled(finished, rows, seconds, machine.peak_bytes(), notes, ended)


def _manifest(
    subject: Subject,
    files: list[FileEntry],
    layers: list[LayerEntry],
    decisions: list[Decision],
    checks: list[Check],
) -> Manifest:
    """The manifest of a bundle that is written and not measured yet."""
    import torch

    request, (model, calibration) = subject.request, subject.entries()
    compiled_on = subject.device.as_dict()
    return Manifest(
        quantkit=__version__,
        content_sha256=content_sha256(files),
        state=_state(checks),
        model=model,
        recipe=tokens.without_paths(request.recipe),
        target=request.target.as_dict(),
        calibration=calibration,
        seed=request.recipe.seed,
        threads=torch.get_num_threads(),
        isa=machine.isa(),
        device={**machine.device(), **({"compiled_on": compiled_on} if compiled_on else {})},
        versions=machine.versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        files=files,
        decisions=decisions,
        checks=checks,
        weights=[],
        code=[CodeEntry(**each) for each in request.recipe.outside()],
        verdict=None,
    )


def _state(checks: Sequence[Check]) -> Any:
    """A failed check fails a gate; an engine that does otherwise than asked is a decision alone."""
    return "complete" if all(check.ok for check in checks if check.name != NAME) else "gate_failed"


def given_back(bundle: Bundle, subject: Subject) -> tuple[list[Row], list[str]]:
    """The measurements of a bundle that had been finished already, and what its decisions warn of.

    Raises:
        InputError: `out-exists`: it is another one; `hash-mismatch`: it was damaged since.
        GateError: `--strict`, and a decision was taken.
    """
    import torch

    manifest, request = bundle.manifest, subject.request
    model, calibration = subject.entries()
    found = {
        "model": manifest.model.source.sha256,
        "recipe": manifest.recipe,
        "code of the recipe": [entry.model_dump() for entry in manifest.code],
        "calibration": manifest.calibration.ids_sha256 if manifest.calibration else None,
        "target": _target(manifest.target),
        "number of threads": manifest.threads,
        "instruction set": manifest.isa,
        "device": _without_chunk(manifest.device.get("compiled_on", {})),
    }
    asked = {
        "model": model.source.sha256,
        "recipe": tokens.without_paths(request.recipe),
        "code of the recipe": request.recipe.outside(),
        "calibration": calibration.ids_sha256 if calibration else None,
        "target": _target(request.target.as_dict()),
        "number of threads": torch.get_num_threads(),
        "instruction set": machine.isa(),
        "device": _without_chunk(subject.device.as_dict()),
    }
    other = [what for what in found if found[what] != asked[what]]
    if other:
        raise exists_already(bundle.path, f"a finished bundle of another {' and '.join(other)}")
    bundle.demand_intact()
    if request.strict:
        refuse(manifest.decisions)
    return [Row.model_validate(row) for row in bundle.measurements], warnings(manifest.decisions)


def _without_chunk(device: Mapping[str, Any]) -> dict[str, Any]:
    """How many sequences fit at once depends on what else the card holds; a finished bundle is what it is."""
    return {key: value for key, value in device.items() if key != "sequences_at_once"}


def _target(target: dict[str, Any] | None) -> tuple[Any, Any] | None:
    """What of a target does not change when it is measured: its name and what its exports are built with."""
    return None if target is None else (target["name"], target["build"])


@contextmanager
def stopping_when_interrupted(build: Build, out: Path) -> Iterator[None]:
    """Turns an interrupt in the body into `Stopped("interrupted")`, which says how much is kept and what to do next."""
    try:
        yield
    except KeyboardInterrupt:
        kept = len(build.done())  # without any, the folder goes as well
        raise Stopped(
            "interrupted",
            where=str(out),
            value=f"{words.plural(kept, 'step')} kept" if kept else "nothing was done that could be kept",
            remedy="the same command with --resume goes on" if kept else "the same command begins anew",
        ) from None
