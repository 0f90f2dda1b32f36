"""Model + recipe + target -> bundle: the order of steps, for transformers and float graphs alike.

    open -> refuse -> prove -> [unit: solve -> commit] -> export -> reload and check -> engines
         -> measure: score -> gates -> measure: speed -> verdict -> page -> bundle

All refusals come before the first unit is touched. Every slow step is committed, so a killed compile goes on where it
stopped and ends with the same `content_sha256`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import (
    Build,
    Bundle,
    Check,
    CodeEntry,
    Decision,
    Manifest,
    content_sha256,
    exists_already,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, Stopped
from quantkit.measurement.engine_layers import NAME
from quantkit.measurement.rows import Row, write_rows
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.estimate import demand_disk, line
from quantkit.pipeline.gates import judge, near, refuse, warnings
from quantkit.pipeline.progress import Progress, Stage, Stages
from quantkit.pipeline.request import Request, demand_model, takes_graph
from quantkit.pipeline.subject import Subject
from quantkit.pipeline.together import begun, met
from quantkit.pipeline.verdict import decide, with_documents
from quantkit.report.kit import words

if TYPE_CHECKING:
    from quantkit.calibrate.ranks import Ranks


@dataclass(frozen=True)
class Compiled:
    """Result of a compile.

    Attributes:
        seconds: `quantize_cpu` (processor seconds from calibration to packed weights) and `total` (wall clock).
        memory_peak_bytes: largest resident size of this process.
        warnings: warnings about the figures.
        stages: finished stages; after a resume, those of this run.
    """

    bundle: Bundle
    rows: list[Row]
    seconds: Mapping[str, float | None]
    memory_peak_bytes: int
    warnings: list[str]
    stages: list[Stage] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        """Deviations from the request."""
        return self.bundle.manifest.decisions

    def as_dict(self) -> dict[str, Any]:
        """Return the `result` of the `--json` envelope."""
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
    model: str, *, recipe: str = "awq-int4", changes: Sequence[str] = (), imatrix: Path | None = None, **how: Any
) -> Request:
    """Read and check a whole request for a compile, before the model is opened.

    Args:
        imatrix: importance matrix for `rtn` to weigh errors by.
        how: see `Request.of`.

    Raises InputError: of `Request.of`, `demand_model` and `weighed_by`.
    """
    taken: tuple[Decision, ...] = ()
    if imatrix is not None:
        from quantkit.pipeline.imatrix import weighed_by

        weighing, taken = weighed_by(imatrix, recipe, changes)
        changes = [*changes, *weighing]
    request = replace(Request.of(model, recipe=recipe, changes=changes, **how), taken=taken)
    demand_model(model, request.adapters)
    return request


def compile_model(request: Request, progress: Progress | None = None, ranks: Ranks | None = None) -> Compiled:
    """Compile a model into a bundle.

    Args:
        ranks: ranks that share the work; None for one process. One that does not lead ends in `Told`.

    Raises InputError: something is not what it has to be; GateError: a check failed (nothing is delivered), or
    `--strict` and a decision was taken; Stopped: interrupted or disk full; what is done is kept.
    """
    progress, watch = progress or Progress(), Stages("open")
    subject = _opened(request) if ranks is None else met(ranks, lambda: _opened(request, ranks))
    for text in (line(subject.expected), *warnings(subject.decisions)):
        progress.note(text)
    progress.plan(subject.stages)
    build = _begun(subject) if ranks is None else begun(subject, ranks, lambda: _begun(subject))
    if build.dropped:
        progress.note(build.dropped)
    if build.finished is not None:
        rows, notes = given_back(build.finished, subject)
        seconds = {"quantize_cpu": None, "total": 0.0}
        return Compiled(build.finished, rows, seconds, machine.peak_bytes(), [*subject.notes, *notes])
    subject.begin(build, progress, watch)
    with (
        stopping_when_interrupted(build, subject.out),
        build,
        stopping_when_full(build.folder),
        subject.device.strict.arithmetic(),
        machine.modules_apart(),
    ):
        return _compiled(subject)


def _opened(request: Request, ranks: Ranks | None = None) -> Subject:
    if request.out is not None and not request.resume and (ranks is None or ranks.leads):
        Build.demand_free(request.out)
    return opened(request, ranks=ranks)


def _begun(subject: Subject) -> Build:
    request = subject.request
    if request.strict:
        refuse(subject.decisions)
    if not request.resume:
        demand_disk(subject.expected, subject.out)
    return Build.open(subject.out, subject.fingerprint(), resume=request.resume)


def opened(request: Request, *, dry: bool = False, ranks: Ranks | None = None) -> Subject:
    """Open and check the subject of a compile; nothing is written.

    Args:
        dry: whether it is only looked at: a model then writes no text to be calibrated on.
        ranks: ranks that share the work; None for one process.

    Raises InputError: whatever would make the compile fail later.
    """
    if takes_graph(request.model):
        from quantkit.pipeline.graphs import prepared as graphs
        from quantkit.pipeline.graphs.subject import GraphSubject

        if ranks is not None:
            rule, remedy = "ranks share the work on a transformer's blocks", "the same command without torchrun"
            raise InputError("ranks-unsupported", request.model, "an ONNX graph", rule, remedy)
        return GraphSubject(graphs.prepare(request))
    from quantkit.pipeline.blocks import prepared
    from quantkit.pipeline.blocks.subject import TransformerSubject

    return TransformerSubject(prepared.prepare(request, write=not dry, ranks=ranks))


def make(subject: Subject) -> None:
    """Run the first half: solve the units, then write, check and compile the exports; nothing is scored yet.

    Raises GateError: `check-failed`; of a strict request, a decision was taken.
    """
    for stage, step in (
        ("", subject.solve),
        ("export", subject.export),
        ("check", subject.check),
        ("", subject.compile_engines),
    ):
        if stage:
            subject.watch.begin(stage)
        step()
        if subject.request.strict:
            refuse(subject.decisions)


def _compiled(subject: Subject) -> Compiled:
    request, build, watch = subject.request, subject.build, subject.watch
    subject.prove()
    if request.strict:
        refuse(subject.decisions)
    make(subject)
    bundle = Bundle(build.bundle, _manifest(subject))
    watch.begin("score")
    rows = subject.score(bundle)
    judged, unjudged = judge(request.recipe.gates, rows, request.gates_asked)
    subject.checks += judged
    subject.decisions += [*unjudged, *near(request.recipe.gates, rows)]
    if request.strict:
        refuse(subject.decisions)
    rows += subject.time(bundle)
    watch.begin("finish")
    subject.demand_unchanged()
    notes = [*subject.notes, *warnings(subject.decisions)]
    write_rows(bundle.path / MEASUREMENTS, rows)
    exports = bundle.manifest.recipe.get("export") or []
    manifest = bundle.manifest.model_copy(
        update={
            "decisions": subject.decisions,
            "checks": subject.checks,
            "state": _state(subject.checks),
            "weights": subject.weights(),
            "files": inventory(bundle.path, build.hashes),
            "verdict": decide(rows, subject.checks, subject.layers, request.target, exports),
        }
    )
    finished = build.finish(with_documents(manifest, rows, notes, bundle.path, build.hashes))
    ended = watch.end()
    seconds = {"quantize_cpu": subject.quantize_cpu, "total": sum(stage.seconds for stage in ended)}
    return Compiled(finished, rows, seconds, machine.peak_bytes(), notes, ended)


def _manifest(subject: Subject) -> Manifest:
    """Describe a written bundle before its measurement."""
    import torch

    from quantkit.kernels.cpu import columns

    request, (model, calibration) = subject.request, subject.entries()
    files, compiled_on = inventory(subject.build.bundle, subject.build.hashes), subject.device.as_dict()
    return Manifest(
        quantkit=__version__,
        content_sha256=content_sha256(files),
        state=_state(subject.checks),
        model=model,
        recipe=tokens.without_paths(request.recipe),
        target=request.target.as_dict(),
        calibration=calibration,
        seed=request.recipe.seed,
        threads=torch.get_num_threads(),
        isa=machine.isa(),
        device={**machine.device(), **({"compiled_on": compiled_on} if compiled_on else {})},
        versions={**machine.versions(), "solvers": columns.language()},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=subject.layers,
        files=files,
        decisions=list(subject.decisions),
        checks=list(subject.checks),
        weights=[],
        code=[CodeEntry(**entry) for entry in request.recipe.outside()],
        verdict=None,
    )


def _state(checks: Sequence[Check]) -> Any:
    """Tell whether a gate failed; an engine that departs from the request is only a decision."""
    return "complete" if all(check.ok for check in checks if check.name != NAME) else "gate_failed"


def given_back(bundle: Bundle, subject: Subject) -> tuple[list[Row], list[str]]:
    """Return the measurements and warnings of a bundle that was finished already.

    Raises InputError: `out-exists`: it is another one; `hash-mismatch`: it was damaged since; GateError: `--strict`,
    and a decision was taken.
    """
    import torch

    manifest, request = bundle.manifest, subject.request
    model, calibration = subject.entries()
    before = manifest.calibration
    pairs = {
        "model": (manifest.model.source.sha256, model.source.sha256),
        "recipe": (manifest.recipe, tokens.without_paths(request.recipe)),
        "code of the recipe": ([entry.model_dump() for entry in manifest.code], request.recipe.outside()),
        "calibration": (before and before.ids_sha256, calibration and calibration.ids_sha256),
        # what of it does not change when it is measured
        "target": tuple(
            aimed and (aimed["name"], aimed["build"]) for aimed in (manifest.target, request.target.as_dict())
        ),
        "number of threads": (manifest.threads, torch.get_num_threads()),
        "instruction set": (manifest.isa, machine.isa()),
        "device": (_without_chunk(manifest.device.get("compiled_on", {})), _without_chunk(subject.device.as_dict())),
    }
    if other := [what for what, (there, here) in pairs.items() if there != here]:
        raise exists_already(bundle.path, f"a finished bundle of another {' and '.join(other)}")
    bundle.demand_intact()
    if request.strict:
        refuse(manifest.decisions)
    return [Row.model_validate(row) for row in bundle.measurements], warnings(manifest.decisions)


def _without_chunk(device: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the number of sequences at once: it depends on other programs on the card."""
    return {key: value for key, value in device.items() if key != "sequences_at_once"}


@contextmanager
def stopping_when_interrupted(build: Build, out: Path) -> Iterator[None]:
    """Turn an interrupt in the body into `Stopped("interrupted")`, with how much is kept and what to do next."""
    try:
        yield
    except KeyboardInterrupt:
        kept = len(build.done())  # without any, the folder goes as well
        again = "; what the last half minute did may run again"  # blocks without hidden states behind them
        raise Stopped(
            "interrupted",
            where=str(out),
            value=f"{words.plural(kept, 'step')} kept" if kept else "nothing was done that could be kept",
            remedy=f"the same command {f'with --resume goes on{again}' if kept else 'begins anew'}",
        ) from None
