"""Compile many models by many recipes: the jobs of a `jobs.yaml`, run by an executor, in one table.

    models: [smollm2-135m, ./my-model, hf:org/name, ./my-model + ./my-lora]   # each by every recipe
    recipes: [gptq-int4, awq-int4]
    jobs:                                         # and these
      - {model: ./my-model, recipe: int3, set: [scheme.weights.group=64], name: small}
    calibration: ./my-text.txt                    # of all jobs, unless one has its own
    out: ./bundles                                # bundles/MODEL--RECIPE each

Relative paths begin at the file's folder. All jobs are checked before one starts. A finished job is not repeated while
its settings and files stay as they are (`OUT/jobs/NAME.json`), a half-done one resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from quantkit import limits
from quantkit._version import __version__
from quantkit.bundle import Bundle, exists_already
from quantkit.bundle.disk import write_atomic, writing
from quantkit.bundle.manifest import MANIFEST
from quantkit.content import Closed, column_of, is_path, known_keys, read_yaml
from quantkit.errors import GateError, InputError, QuantkitError, Stopped, from_validation
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up
from quantkit.model.device import CPU as PROCESSOR
from quantkit.model.source.alias import ALIASES, unknown_model
from quantkit.pipeline.compile import Compiled, asked, compile_model
from quantkit.pipeline.gates import failed_gate
from quantkit.pipeline.many.executors import CPU, GPU, stamps
from quantkit.pipeline.many.jobs import Executor, Job
from quantkit.pipeline.progress import Progress, Stage
from quantkit.pipeline.request import default_out, parted
from quantkit.report.bundle import figures
from quantkit.report.kit import words

# seconds that a job waits for the process of a dead node to let go of its build
_FREED = 60.0
_RECORDS = "jobs"
# arguments of a compile that may be paths
_REFERENCES = ("recipe", "target", "calibration", "imatrix")


class _Settings(Closed):
    """Settings of a job, or of all; see `Request.of`."""

    target: str | None = None
    calibration: str | None = None
    set_: list[str] = Field(default=[], alias="set")


class BatchJob(_Settings):
    """One model by one recipe; its `set` follows that of all jobs. `name` is that of its bundle, else MODEL--RECIPE."""

    model: str
    recipe: str
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] = None


class Batch(_Settings):
    """The document `jobs.yaml`.

    Args:
        models: as for `quantkit compile`; `MODEL + ./ADAPTER` merges one.
        recipes: names or paths; every model by each.
        jobs: further jobs.
        device: `cpu`, or `cuda`: a job takes a GPU.
        speed, vllm, strict: as of `quantkit compile`.
        cpus: processors of a job on a cluster; 0: a node's, or a GPU's share of them.
        limit: most hours of a job.
        out: folder of the bundles.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    models: list[str] = Field(default=[])
    recipes: list[str] = Field(default=[])
    jobs: list[BatchJob] = Field(default=[])
    device: str = PROCESSOR
    speed: bool = True
    vllm: bool = True
    strict: bool = False
    cpus: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[float | None, Field(gt=0)] = None
    out: str = "./bundles"

    @model_validator(mode="after")
    def _has_jobs(self) -> Self:
        if bool(self.models) != bool(self.recipes):
            raise ValueError("`models` and `recipes` come together: each model by every recipe")
        if not self.models and not self.jobs:
            raise ValueError("a batch has `models` and `recipes`, or `jobs`")
        return self

    def all(self) -> list[BatchJob]:
        """List all jobs, with the settings of all in each."""
        product = [BatchJob(model=model, recipe=recipe) for model in self.models for recipe in self.recipes]
        common = {"target": self.target, "calibration": self.calibration}
        return [
            job.model_copy(
                update={
                    **{name: value for name, value in common.items() if getattr(job, name) is None},
                    "set_": [*self.set_, *job.set_],
                }
            )
            for job in (*product, *self.jobs)
        ]


@dataclass(frozen=True)
class CompileJob(Job):
    """One compile.

    Args:
        label: name of the job, and of its bundle.
        model: as of `Request`, a path from the root.
        how: arguments of `compile.asked`, as JSON can hold them.
        out: folder of the bundle.
        seen: see `Job.paths`.
        inputs: hash of settings and files, by which a finished job is known.
        limit: see `Job`.
    """

    label: str
    model: str
    how: Mapping[str, Any]
    out: str
    seen: tuple[str, ...]
    inputs: str = ""
    limit: float | None = None

    @classmethod
    def of(cls, model: str, how: Mapping[str, Any], *, limit: float | None = None) -> CompileJob:
        """Check a compile and make its job. Raises InputError: as `compile.asked`; `unknown-model`."""
        if model not in ALIASES and not model.startswith("hf:") and not is_path(model):
            raise unknown_model(model)
        request = asked(model, **how)
        references = [model, *request.adapters, how["recipe"], how.get("target"), how.get("calibration")]
        paths = (column_of(name)[0] for name in references if name and is_path(name) and not name.startswith("hf:"))
        seen = tuple(sorted({*paths, *([how["imatrix"]] if how.get("imatrix") else [])}))
        known = {
            "quantkit": __version__,
            "model": [model, *request.adapters],
            "recipe": [request.recipe.as_dict(), request.recipe.outside()],
            "target": request.target.as_dict(),
            "files": stamps(seen, times=True),
            "how": {key: how.get(key) for key in ("device", "speed", "vllm", "strict")},
        }
        inputs = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
        label = f"{'-'.join(_stem(part) for part in (model, *request.adapters))}--{request.recipe.name}"
        return cls(label, model, how, label, seen, inputs, limit)

    @property
    def name(self) -> str:
        """See `Job`."""
        return self.label

    @property
    def place(self) -> str:
        """See `Job`."""
        return CPU if self.how.get("device", PROCESSOR) == PROCESSOR else GPU

    @property
    def paths(self) -> tuple[str, ...]:
        """See `Job`."""
        return self.seen


def compile_one(job: CompileJob, progress: Progress) -> dict[str, Any]:
    """Compile in the job's process, or go on; return what the bundle does not hold. Raises as `compile_model`."""
    request, began = replace(asked(job.model, **job.how), out=Path(job.out), resume=True), time.monotonic()
    while True:
        try:
            compiled = compile_model(request, progress)
            break
        except InputError as problem:
            # of a node that died, the last process may be a moment behind
            if problem.code != "build-locked" or time.monotonic() - began > _FREED:
                raise
            time.sleep(1.0)
    kept = ("seconds", "memory_peak_bytes", "stages")
    return {**{name: compiled.as_dict()[name] for name in kept}, "warnings": compiled.warnings}


def compile_on(model: str, executor: Executor, out: Path | None, progress: Progress, **how: Any) -> Compiled:
    """Compile elsewhere into a folder that is shared with there.

    Raises: as `compile_model`, and InputError: that of the executor.
    """
    resume, how = how.pop("resume"), _absolute(how, Path())
    job = CompileJob.of(_at(model, Path()), how)
    place = default_out_of(job.label, resume=resume) if out is None else out
    if (place.exists() or _partial(place).exists()) and not resume:
        raise exists_already(place if place.exists() else _partial(place))
    with _token(place.absolute().parent, f".{place.name}.on") as token:
        job = replace(job, out=str(place.absolute()), seen=(*job.seen, str(token)))
        progress.plan({job.name: 1.0})
        (outcome,) = executor.run([job], compile_one, progress)
    if outcome.state != "done":
        raise _raised(outcome.error or {}, outcome.exit)
    told, bundle = outcome.answer, Bundle.load(place)
    rows = [Row.model_validate(row) for row in bundle.measurements]
    stages = [Stage(**stage) for stage in told["stages"]]
    return Compiled(bundle, rows, told["seconds"], told["memory_peak_bytes"], told["warnings"], stages)


def default_out_of(label: str, *, resume: bool) -> Path:
    """Return the folder of a compile without `--out`; see `request.default_out`."""
    model, _, recipe = label.partition("--")
    return default_out(model, recipe, resume=resume)


def _raised(error: Mapping[str, str], code: int) -> QuantkitError:
    return {GateError.exit: GateError, Stopped.exit: Stopped}.get(code, InputError)(**error)


@contextmanager
def _token(folder: Path, name: str, *, keep: bool = False) -> Iterator[Path]:
    """Write a small file by which a folder is known: another folder under the same path does not have it."""
    token = folder / name
    with writing(token):
        folder.mkdir(parents=True, exist_ok=True)
        if not (keep and token.exists()):
            write_atomic(token, f"{secrets.token_hex(16)}\n".encode())
    try:
        yield token
    finally:
        if not keep:
            token.unlink(missing_ok=True)


# --- a batch ---


@dataclass
class BatchRun:
    """A batch, checked: nothing has run yet.

    Attributes:
        rows: name of a job -> its row of the table.
    """

    path: Path
    out: Path
    config: Batch
    jobs: list[CompileJob]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, **allowed: bool) -> BatchRun:
        """Read and check a `jobs.yaml`, and every job in it.

        Args:
            allowed: `trust_remote_code`, `allow_code`.

        Raises InputError: `batch-invalid`, also for two jobs of one name; `out-exists`; those of `CompileJob.of`, with
        the number of the job.
        """
        data, where = read_yaml(path), str(path)
        if not isinstance(data, dict):
            raise InputError("batch-invalid", where, "not a mapping", "jobs.yaml is a YAML mapping")
        try:
            config = Batch.model_validate(data)
        except ValidationError as error:
            raise from_validation(error, where=where, code="batch-invalid", known=known_keys(Batch)) from None
        home = path.expanduser().absolute().parent
        batch = cls(path, home / Path(config.out).expanduser(), config, [])
        for number, told in enumerate(config.all(), 1):
            try:
                batch.jobs.append(batch._job(told, home, allowed))
            except InputError as problem:
                place = f"{where}: job {number} ({told.model}, {told.recipe})"
                place = f"{place}: {problem.where}" if problem.where else place
                raise InputError(problem.code, place, problem.value, problem.rule, problem.remedy) from None
        return batch

    def _job(self, told: BatchJob, home: Path, allowed: Mapping[str, bool]) -> CompileJob:
        config, (model, *adapters) = self.config, parted(told.model)
        how: dict[str, Any] = {"recipe": told.recipe, "target": told.target, "calibration": told.calibration}
        how |= {
            "changes": told.set_,
            "adapters": adapters,
            "device": config.device,
            "speed": config.speed,
            "vllm": config.vllm,
        }
        how |= {"strict": config.strict, **allowed}
        limit = None if config.limit is None else 3600 * config.limit
        job = CompileJob.of(_at(model, home), _absolute(how, home), limit=limit)
        job = replace(job, label=told.name or job.label)
        job = replace(job, out=str(self.out / job.label))
        if job.label in (_RECORDS, *(other.label for other in self.jobs)):
            rule = "each job has a folder of its own, OUT/MODEL--RECIPE or OUT/NAME"
            owner, remedy = "another job's", "give this job a `name`, or leave it out"
            if job.label == _RECORDS:
                owner, remedy = "that of the batch's records", "give this job another `name`"
            raise InputError("batch-invalid", value=f"the folder {job.out} is {owner}", rule=rule, remedy=remedy)
        out = Path(job.out)
        if (out / MANIFEST).is_file():
            if self._record(job).get("inputs", job.inputs) != job.inputs:
                problem = exists_already(out, "finished with other settings or files")
                problem.remedy = "give the job another `name`, take another `out`, or delete the folder"
                raise problem
        elif os.path.lexists(out):
            raise exists_already(out)
        return job

    def states(self) -> dict[str, Any]:
        """List the jobs and how far each is, `done`, `half-done` or `waiting`, as JSON."""

        def state(job: CompileJob) -> str:
            begun = "half-done" if _partial(Path(job.out)).exists() else "waiting"
            return "done" if self._is_done(job) else begun

        return {"out": str(self.out), "jobs": [self._about(job) | {"state": state(job)} for job in self.jobs]}

    def run(self, executor: Executor, progress: Progress) -> None:
        """Run the unfinished jobs; `rows` then has all.

        Raises InputError: those of the executor; Stopped: interrupted, or the disk is full.
        """
        left = [job for job in self.jobs if not self._is_done(job)]
        for job in self.jobs:
            if job not in left:
                self.rows[job.name] = self._row(job, self._record(job))
        progress.plan({job.name: 1.0 for job in left})
        try:
            with _token(self.out / _RECORDS, "id", keep=True) as token:
                seen = [replace(job, seen=(*job.seen, str(token))) for job in left]
                for outcome in executor.run(seen, compile_one, progress) if left else ():
                    job, told = outcome.job, {"node": outcome.node}
                    if outcome.state == "done":
                        told |= {"inputs": job.inputs, "seconds": outcome.answer["seconds"]["total"]}
                        write_atomic(self._place(job), json.dumps(told).encode())
                        self.rows[job.name] = self._row(job, told)
                    else:
                        row = {"state": outcome.state, "error": outcome.error, "exit": outcome.exit}
                        self.rows[job.name] = self._about(job) | told | row
                    shown = self.rows[job.name]
                    progress.note(f"{job.name}: {shown['state']}" + (f" on {outcome.node}" if outcome.node else ""))
        except (KeyboardInterrupt, Stopped) as problem:
            full = isinstance(problem, Stopped) and problem.code == "disk-full"
            value = f"{len(self.rows)} of {words.plural(len(self.jobs), 'job')} ended, {len(left)} were to do"
            remedy = f"{'make room; ' if full else ''}the same command goes on"
            raise Stopped("disk-full" if full else "interrupted", str(self.out), value, remedy=remedy) from None

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {"out": str(self.out), "jobs": [self.rows[job.name] for job in self.jobs if job.name in self.rows]}

    def error(self) -> QuantkitError | None:
        """Return the error of a batch with jobs that failed; its exit code is the gravest of theirs."""
        failed = [row for row in self.rows.values() if row["exit"]]
        if not failed:
            return None
        gravest = max(failed, key=lambda row: row["exit"])
        first = _raised(gravest["error"], gravest["exit"])
        value = f"{len(failed)} of {words.plural(len(self.rows), 'job')} failed; {gravest['job']}: {first.line()}"
        remedy = "the same command repeats these alone"
        return type(first)("jobs-failed", where=str(self.path), value=value, remedy=remedy)

    def _about(self, job: CompileJob) -> dict[str, Any]:
        model = " + ".join(_stem(part) for part in (job.model, *job.how["adapters"]))
        return {"job": job.name, "model": model, "recipe": job.how["recipe"], "bundle": job.out}

    def _place(self, job: CompileJob) -> Path:
        return self.out / _RECORDS / f"{job.name}.json"

    def _record(self, job: CompileJob) -> dict[str, Any]:
        """Read the record of a finished job; empty without one, or with a damaged one."""
        with suppress(OSError, ValueError, InputError):
            told = json.loads(limits.read(self._place(job)))
            return told if isinstance(told, dict) else {}
        return {}

    def _is_done(self, job: CompileJob) -> bool:
        return (Path(job.out) / MANIFEST).is_file() and self._record(job).get("inputs") == job.inputs

    def _row(self, job: CompileJob, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a finished job."""
        bundle = Bundle.load(Path(job.out))
        rows, manifest = [Row.model_validate(row) for row in bundle.measurements], bundle.manifest
        first = {row.name: row for row in reversed(rows)}
        kl, bits, size = (first.get(name) for name in ("accuracy.kl", "size.bits_per_weight", "size.bytes"))
        timed = first.get("latency.decode_step") or first.get("latency.prefill")
        faster, failed = speed_up(timed) if timed else None, failed_gate(manifest)
        return self._about(job) | {
            "state": "gate-failed" if failed else "done",
            "content_sha256": manifest.content_sha256,
            "kl": kl and kl.value,
            "kl_ci95": kl and kl.ci95,
            "bits_per_weight": bits and bits.value,
            "bytes": size and size.value,
            "size_ratio": size.baseline.ratio if size and size.baseline else None,
            "speed_ratio": faster and faster.ratio,
            "speed_ratio_ci95": faster and faster.interval,
            "seconds": told.get("seconds"),
            "node": told.get("node", ""),
            "verdict": figures.verdict(manifest, rows, prompts=False)[0] if manifest.verdict else None,
            "error": failed and failed.as_dict(),
            "exit": failed.exit if failed else 0,
        }


def _at(reference: str, home: Path) -> str:
    """Return a model, recipe, target or set as it is named from any folder."""
    if not is_path(reference) or reference.startswith("hf:"):
        return reference
    return os.path.normpath(home.absolute() / Path(reference).expanduser())


def _absolute(how: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Make the paths in arguments of a compile start at the root."""
    changed: dict[str, Any] = {name: _at(str(how[name]), home) for name in _REFERENCES if how.get(name) is not None}
    return {
        **how,
        **changed,
        "adapters": [_at(path, home) for path in how["adapters"]],
        "changes": list(how["changes"]),
    }


def _stem(model: str) -> str:
    """Return a model's name without its place: `hf:org/name@main` is `name`."""
    last = Path(model.removeprefix("hf:").partition("@")[0])
    return last.stem if last.suffix in (".onnx", ".gguf") else last.name


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")
