"""A compile's hardest half minute, first: the recipe on the largest block alone, by the code that will do them all.

    open, without reading the weights -> what is refused -> the largest block cut out (`one_block.py`)
    -> quantize, export, check that, on a few sequences -> what the whole will take -> what would have failed

What was measured corrects what was reckoned: a stage's seconds are those of the plan, times what the block took over
what the plan says of the block; the peak is the block's own, plus what the plan says the whole takes beyond it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content, machine
from quantkit.bundle.disk import not_writable
from quantkit.errors import InputError, QuantkitError
from quantkit.pipeline.estimate import demand_disk, estimate, here, spec
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request
from quantkit.planning.compiling.forecast import predict
from quantkit.planning.compiling.result import Compiling, Machine
from quantkit.planning.compiling.spec import CompileSpec
from quantkit.report.kit import words

if TYPE_CHECKING:
    from quantkit.pipeline.blocks.prepared import Prepared

# seconds that all of it may take, where the block allows; and that looking through the other blocks may
SECONDS, _LOOKING = 30.0, 5.0
# a block that would take more than so many times that is not run
_PATIENCE = 4.0
# seconds of a block below which it is run twice: imports and first calls are a good part of the first time
_WARM = 8.0
# what the seconds of a part that runs once in a process tell of others is limited
_FACTORS = (0.2, 5.0)
_REHEARSED = ("quantize", "export", "check", "build")


@dataclass(frozen=True)
class Finding:
    """What was found out before it would have been.

    Args:
        code: stable: that of the error it would have been.
        line: for people, with the remedy.
        fails: whether the compile would end with it.
    """

    code: str
    line: str
    fails: bool = True


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Args:
        compiling: what the whole will take, corrected by what the block took; None where it never came so far.
        findings: what would fail, and what is worth knowing.
        block: that was run; "" where none was.
        sequences: that it was calibrated on.
        measured: stage -> processor seconds of the block.
        factors: stage -> what was measured over what the plan says of the block.
        memory_peak_bytes: of the process while it ran; None where something larger had been in it before.
        seconds: that the rehearsal took.
    """

    compiling: Compiling | None
    findings: Sequence[Finding]
    block: str = ""
    sequences: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found that the compile would end with."""
        return not any(finding.fails for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ok": self.ok,
            "compiling": self.compiling.as_dict() if self.compiling is not None else None,
            "findings": [{"code": each.code, "line": each.line, "fails": each.fails} for each in self.findings],
            "block": self.block or None,
            "sequences": self.sequences,
            "measured_cpu_seconds": dict(self.measured),
            "factors": dict(self.factors),
            "memory_peak_bytes": self.memory_peak_bytes,
            "seconds": self.seconds,
        }


def rehearse(request: Request, progress: Progress | None = None, *, seconds: float = SECONDS) -> Rehearsal:
    """Find out what a compile would take, and what it would fail with; nothing of it is kept.

    Args:
        seconds: to take, about; a block that needs far more is not run.

    Raises:
        InputError: `compile-unknown`, of a graph of images.
    """
    from quantkit.pipeline.graphs.exported_module import takes_graph

    if takes_graph(request.model):
        raise InputError(
            "compile-unknown",
            where=request.model,
            value="a float ONNX graph",
            rule="blocks of transformers are rehearsed",
            remedy="quantkit compile --dry-run says what becomes of a graph",
        )
    return _Rehearsing(request, progress or Progress(), seconds).run()


class _Rehearsing:
    """The steps of one rehearsal; each adds to the findings."""

    def __init__(self, request: Request, progress: Progress, seconds: float) -> None:
        self.request, self.progress, self.limit = request, progress, seconds
        self.findings: list[Finding] = []
        self.began = time.perf_counter()

    def run(self) -> Rehearsal:
        from quantkit.pipeline.blocks.prepared import prepare

        self.progress.plan({"open": 8.0, "quantize": self.limit / 2, "export": 10.0, "check": 2.0})
        prepared: Prepared | None = None
        with self._noting("rehearsal-failed"):
            prepared = prepare(self.request, whole=False)
        if prepared is None:
            return Rehearsal(None, self.findings, seconds=time.perf_counter() - self.began)
        expected = estimate(prepared)
        ran = self._block(prepared, expected)
        self._look_through(prepared)
        found = ran.compiling or expected
        self._demand_room(found, prepared.out)
        return replace(ran, compiling=found, findings=tuple(self.findings), seconds=time.perf_counter() - self.began)

    @contextlib.contextmanager
    def _noting(self, instead: str = "") -> Iterator[None]:
        """What is raised inside is a finding; of a library's own exceptions, under the code `instead`."""
        try:
            yield
        except QuantkitError as problem:
            self.findings.append(Finding(problem.code, problem.line()))
        except Exception as problem:  # whatever another library makes of what it is given
            if not instead:
                raise
            said = " ".join(str(problem).split())[:300] or type(problem).__name__
            self.findings.append(Finding(instead, f"{instead}: {type(problem).__name__}: {said}"))

    def _block(self, prepared: Prepared, expected: Compiling) -> Rehearsal:
        """Compile the largest block alone."""
        from quantkit.pipeline.rehearsal import one_block

        index = _largest(prepared)
        name = prepared.stream.block_names[index]
        whole, computer = spec(prepared), here()
        layer = whole.architecture.layers[index]
        single = replace(whole, architecture=replace(whole.architecture, layers=[layer]), timed=0.0)
        samples = _affordable(single, computer, self.limit / 2)
        small = replace(single, sequences=min(samples, whole.sequences))
        needed = predict(small, computer).seconds.get("quantize", 0.0)
        if needed > _PATIENCE * self.limit:
            line = f"{name} takes about {words.duration(needed)} alone: not run, its time and memory are the plan's"
            self.findings.append(Finding("block-not-run", line, fails=False))
            return Rehearsal(expected, [])
        before, measured, peak = machine.peak_bytes(), dict[str, float](), None
        with self._noting("rehearsal-failed"), self._room(prepared.out) as home:
            try:
                one_block.cut(prepared, index, home / "model")
            except InputError as problem:
                if problem.code != "block-not-alone":
                    raise
                self.findings.append(Finding(problem.code, problem.line(), fails=False))
                return Rehearsal(expected, [])
            measured = self._compile(prepared, index, home / "first", home / "model", small.sequences)
            if measured.get("quantize", _WARM) < _WARM:  # what only a first block takes would be multiplied by all
                again = self._compile(prepared, index, home / "second", home / "model", small.sequences)
                measured["quantize"] = again["quantize"]
            peak = machine.peak_bytes()
        if not measured:
            return Rehearsal(expected, [], block=name, sequences=small.sequences)
        reckoned = predict(_as_cut(small), computer)
        factors = {
            stage: min(max(spent / reckoned.cpu_seconds[stage], _FACTORS[0]), _FACTORS[1])
            for stage, spent in measured.items()
            if reckoned.cpu_seconds.get(stage, 0.0) > 0
        }
        own = peak if peak is not None and peak > before else None
        memory = _scaled_memory(expected, reckoned, own)
        found = _scaled(expected, factors, measured, reckoned, memory)
        return Rehearsal(found, [], name, small.sequences, measured, factors, own)

    def _compile(self, prepared: Prepared, index: int, out: Path, model: Path, samples: int) -> dict[str, float]:
        """Stage -> processor seconds of the block's quantizing, exports and checks."""
        from quantkit.bundle import Build
        from quantkit.pipeline.blocks.prepared import prepare
        from quantkit.pipeline.blocks.subject import TransformerSubject
        from quantkit.pipeline.compile import make
        from quantkit.pipeline.progress import Stages
        from quantkit.pipeline.rehearsal import one_block

        request = replace(
            self.request,
            model=str(model.absolute()),
            recipe=one_block.alone(prepared.request.recipe, prepared, index),
            out=out,
            resume=False,
            strict=False,
            speed=False,
            as_shipped=False,
        )
        seen = prepared.calibration
        if seen is not None:
            seen = replace(seen, ids=one_block.few(seen.ids, max(samples, 1)))
        scoring = replace(prepared.scoring, ids=one_block.few(prepared.scoring.ids, 1), pairs=None)
        stages = Stages("open")
        subject = TransformerSubject(prepare(request, whole=False, seen=(seen, scoring)))
        with Build.open(out, subject.fingerprint(), resume=False) as build:
            make(subject.work(build, self.progress, stages), stages)
        found: dict[str, float] = {}
        for stage in stages.end():
            if stage.name in _REHEARSED:
                found[stage.name] = found.get(stage.name, 0.0) + stage.cpu_seconds
        return found

    @contextlib.contextmanager
    def _room(self, out: Path) -> Iterator[Path]:
        """A folder beside where the bundle will be; gone at the end."""
        parent = next((folder for folder in out.absolute().parents if folder.is_dir()), Path())
        try:
            home = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}-rehearsal-"))
        except OSError as problem:
            raise not_writable(out, problem) from None
        try:
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _look_through(self, prepared: Prepared) -> None:
        """Weights of the other blocks, as many as there is time for: NaN, infinity, files cut short."""
        weights, end = prepared.original.weights, time.perf_counter() + _LOOKING
        names = list(weights.entries)
        for done, name in enumerate(names):
            if time.perf_counter() > end:
                line = f"{len(names) - done} of {len(names)} tensors were not looked through; a compile does so first"
                self.findings.append(Finding("weights-unseen", line, fails=False))
                return
            before = len(self.findings)
            with self._noting():
                weights.read(name)
            if len(self.findings) > before:
                if any(finding == self.findings[-1] for finding in self.findings[:-1]):
                    self.findings.pop()  # the block had it already
                return

    def _demand_room(self, found: Compiling, out: Path) -> None:
        """Disk for the bundle and for the float model, and memory."""
        with self._noting():
            demand_disk(found, out)
        cache = content.cache_dir()
        home = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), Path())
        if found.disk.cache > (free := shutil.disk_usage(home).free):
            line = f"{home}: {words.size(free)} are free, the float model takes {words.size(found.disk.cache)}"
            self.findings.append(Finding("disk-space", f"{line}: speed would not be measured", fails=False))
        limit, free = machine.memory_limit(), machine.memory_available() + _resident()
        if found.peak > limit:
            line = (
                f"it takes about {words.size(found.peak)} ({found.at_peak}), this process may have {words.size(limit)}"
            )
            self.findings.append(Finding("out-of-memory", f"out-of-memory: {line}; fewer --set calibration.samples"))
        elif found.peak > free:
            line = f"it takes about {words.size(found.peak)} ({found.at_peak}), {words.size(free)} are free now"
            self.findings.append(Finding("memory-short", f"memory-short: {line}", fails=False))


def _largest(prepared: Prepared) -> int:
    """The block with the most weights to quantize; of all its weights, where nothing is quantized."""
    names, layers = prepared.stream.block_names, prepared.layers

    def size(block: str) -> tuple[int, int]:
        inside = {name: n * k for name, (n, k) in layers.inside.items() if name.startswith(f"{block}.")}
        return sum(n for name, n in inside.items() if name in layers.schemes), sum(inside.values())

    return max(range(len(names)), key=lambda index: size(names[index]))


def _affordable(single: CompileSpec, here: Machine, seconds: float) -> int:
    """Sequences on which the block takes about so long; one at least."""
    if not single.sequences:
        return 0
    samples = 1
    while samples < single.sequences:
        if predict(replace(single, sequences=2 * samples), here).seconds["quantize"] > seconds:
            break
        samples *= 2
    return min(samples, single.sequences)


def _as_cut(small: CompileSpec) -> CompileSpec:
    """The compile of the block alone, with the vocabulary that is kept."""
    from quantkit.pipeline.rehearsal.one_block import ROWS

    model = small.architecture
    vocabulary = model.head.N if model.head is not None else model.vocabulary
    if not vocabulary or vocabulary <= ROWS:
        return replace(small, scored=small.scored_length)
    head = replace(model.head, N=ROWS) if model.head is not None else None
    embeddings = max(model.embeddings - (vocabulary - ROWS) * model.hidden, 0)
    return replace(small, architecture=replace(model, embeddings=embeddings, head=head), scored=small.scored_length)


def _scaled_memory(expected: Compiling, reckoned: Compiling, own: int | None) -> dict[str, float]:
    """Peaks of the whole: where the block's was measured, by as much as it was over what was reckoned of it."""
    if own is None:
        return dict(expected.memory)
    parts = [part for part in reckoned.memory if part.partition(" ")[0] in ("open", "begin", *_REHEARSED)]
    beyond = own - max(reckoned.memory[part] for part in parts)
    return {part: peak + beyond for part, peak in expected.memory.items()}


def _scaled(
    expected: Compiling,
    factors: Mapping[str, float],
    measured: Mapping[str, float],
    reckoned: Compiling,
    memory: Mapping[str, float],
) -> Compiling:
    """The plan of the whole, each stage times what the block took over what was reckoned of it; of what was not
    rehearsed, times what all of the block took.
    """
    both = [stage for stage in measured if stage in factors]
    overall = sum(measured[stage] for stage in both) / max(sum(reckoned.cpu_seconds[stage] for stage in both), 1e-9)
    overall = min(max(overall, _FACTORS[0]), _FACTORS[1])

    def turned(spent: Mapping[str, float]) -> dict[str, float]:
        return {
            stage: value * factors.get(stage, overall if stage != "speed" else 1.0) for stage, value in spent.items()
        }

    return replace(
        expected, seconds=turned(expected.seconds), cpu_seconds=turned(expected.cpu_seconds), memory=dict(memory)
    )


def _resident() -> int:
    """Bytes that this process has now: what it may use again."""
    import psutil

    return int(psutil.Process().memory_info().rss)
