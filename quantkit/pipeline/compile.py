"""Model + recipe + target -> bundle: the order of things.

    validate -> open -> lay out -> [block: passes -> commit] -> export -> reload and check -> score -> gates -> speed
             -> verdict -> page -> bundle

Everything that can be refused is refused before the first block is touched. Every step that took time is committed, so
a killed compile goes on where it was and ends with the same `content_sha256`.
"""

from __future__ import annotations

import datetime
import functools
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quantkit
from quantkit import registry
from quantkit.bundle import (
    Build,
    Bundle,
    CalibrationEntry,
    Check,
    Decision,
    LayerEntry,
    Manifest,
    ModelEntry,
    SourceEntry,
    content_sha256,
    inventory,
    stopping_when_full,
)
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import GateError, InputError, Stopped
from quantkit.measure.rows import Row, write_rows
from quantkit.measure.size import folder_of, size_rows
from quantkit.passes import NOTE, decision
from quantkit.pipeline import tokens
from quantkit.pipeline.estimate import demand_disk, estimate, head_size, times
from quantkit.pipeline.gates import judge
from quantkit.pipeline.layers import ASKED, UNTIED, Layers, lay_out
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request, default_out
from quantkit.pipeline.worth import HARM, REPORT, decide, page, try_to_time, worst_positions
from quantkit.plan import machine

if TYPE_CHECKING:
    from quantkit.calibrate.sets import TokenSet
    from quantkit.model.finished import Finished
    from quantkit.model.open import Source
    from quantkit.model.stream import StreamedModel
    from quantkit.pipeline.work import Step, Worked

# packages that an ONNX graph's bytes depend on
_GRAPH = ("onnx", "onnx-ir", "onnxscript")
# a few tokens are enough to trace a block and to prove its folds
_PROBE = (2, 12)


@dataclass(frozen=True)
class Compiled:
    """What a compile yields.

    Args:
        bundle: on disk.
        rows: its measurements.
        seconds: `quantize_cpu` (processor seconds from calibration to packed weights) and `total` (wall clock).
        memory_peak_bytes: the most that this process had resident.
        warnings: what a reader must know about the figures.
    """

    bundle: Bundle
    rows: list[Row]
    seconds: Mapping[str, float | None]
    memory_peak_bytes: int
    warnings: list[str]

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
            "seconds": dict(self.seconds),
            "memory_peak_bytes": self.memory_peak_bytes,
        }


@dataclass(frozen=True)
class Prepared:
    """A request whose every input was opened and found good; nothing has been written.

    Args:
        original: the model as opened.
        source: the same, untied where a pass of scope `model` will make two tensors of a tied one.
        cpu_seconds: processor seconds that passes of scope `model` took to find out what they will do.
    """

    request: Request
    original: Source
    source: Source
    stream: StreamedModel
    layers: Layers
    steps: list[Step]
    calibration: TokenSet | None
    scoring: TokenSet
    out: Path
    decisions: list[Decision]
    cpu_seconds: float = 0.0


def prepare(request: Request) -> Prepared:
    """Open and check everything a compile needs.

    Raises:
        InputError: anything that would make it fail later.
    """
    from quantkit.model.open import open_model
    from quantkit.model.stream import StreamedModel
    from quantkit.pipeline.work import Step, check_order, looks_at_data

    recipe = request.recipe
    source = open_model(request.model, trust_remote_code=request.trust_remote_code)
    if source.kind not in recipe.models:
        raise InputError(
            "model-kind",
            where=source.ref,
            value=f"a {source.kind}",
            rule=f"recipe {recipe.name} is for {', '.join(recipe.models)}",
            remedy="choose another recipe, or add the kind to its `models`",
        )
    if recipe.scheme.kv_cache is not None and source.kind != "decoder":
        raise InputError(
            "cache-unknown",
            where=source.ref,
            value=f"a {source.kind}",
            rule="only a decoder has a KV cache",
            remedy="--set scheme.kv_cache=null",
        )
    stream = StreamedModel(source)
    for tensor in dict.fromkeys(stream.files.values()):
        source.weights.read(tensor)  # finite, every one of them: now, not hours later
    if recipe.passes:
        _demand_equal_experts(stream)
    steps = [Step(registry.load("passes", step.name), step.settings) for step in recipe.passes]
    check_order(steps)
    begun = time.process_time()
    stream, taken = _transformed(stream, steps, recipe.seed)
    cpu_seconds = time.process_time() - begun
    original, source = source, stream.source
    layers = lay_out(recipe, stream.skeleton, stream.block_names, source.dtype, head=stream.head)
    for step in recipe.export:
        registry.load("export", step.name).accepts(
            step.options,
            layers.schemes,
            layers.plain,
            layers.padded(),
            tied=layers.tied,
            shapes=layers.shapes,
            merged=layers.merged,
            partly=looks_at_data(steps) and recipe.calibration.experts == "keep",
            activations=layers.activations,
            cache=recipe.scheme.kv_cache,
        )
    decisions = [*taken, *layers.decisions]
    looks = looks_at_data(steps, layers.activations.values(), recipe.scheme.kv_cache)
    calibration, scoring = tokens.load(recipe, source, calibrate=looks, decisions=decisions)
    for name in request.left_out:
        reason = f"no runtime of {request.target.name} reads it: {', '.join(request.target.runtimes)}"
        decisions.append(decision("export", NOTE, name, reason))
    notes = calibration.notes if calibration else ()
    where = tokens.public(recipe.calibration.set)
    decisions += [decision("calibrate", NOTE, where, note) for note in notes]
    out = request.out or default_out(source.name, recipe.name, resume=request.resume)
    return Prepared(request, original, source, stream, layers, steps, calibration, scoring, out, decisions, cpu_seconds)


def _transformed(stream: StreamedModel, steps: list[Step], seed: int) -> tuple[StreamedModel, list[Decision]]:
    """The model as passes of scope `model` will have it, and what they decided."""
    from quantkit.model.open import untied
    from quantkit.model.stream import StreamedModel

    decisions: list[Decision] = []
    for step in steps:
        if step.run.scope != "model":
            continue
        outcome = step.run.transform(stream, step.settings, seed)
        decisions += outcome.decisions
        if outcome.transform is None:
            continue
        source = untied(stream.source, stream.files) if outcome.unties else stream.source
        if source is not stream.source:
            before, after = stream.source.weights.total_bytes(), source.weights.total_bytes()
            reason = f"it will differ from the embedding that it was tied to: {after - before} bytes more"
            decisions.append(decision(step.run.name, UNTIED, stream.head or "head", reason, before, after))
            made = StreamedModel(source)
            made.transforms = stream.transforms
            stream = made
        stream.transforms.append(outcome.transform)
    return stream, decisions


def _demand_equal_experts(stream: StreamedModel) -> None:
    """Prove on the first block with experts that they are what their linears make of them; the others are of its class.

    Raises:
        InputError: `architecture-unsupported`.
    """
    from quantkit.model import experts

    for index, name in enumerate(stream.block_names):
        if experts.found_in(stream.blocks[index]):
            experts.demand_equal(stream.load(index), name)
            return


def compile_model(request: Request, progress: Progress | None = None) -> Compiled:
    """Compile a model into a bundle.

    Raises:
        InputError: something is not what it has to be.
        GateError: a check failed (nothing is delivered), or `--strict` and a decision was taken.
        Stopped: interrupted or disk full; what is done is kept.
    """
    progress = progress or Progress()
    started = time.perf_counter()
    prepared = prepare(request)
    expected = estimate(prepared)
    progress.note(expected.line())
    progress.plan(expected.seconds)
    if request.strict:
        _refuse(prepared.decisions)
    if not request.resume:
        demand_disk(expected, prepared.out)
    build = Build.open(prepared.out, fingerprint(prepared), resume=request.resume)
    if build.finished is not None:
        return _finished(build.finished, prepared)
    try:
        with build:
            return _Compilation(prepared, build, progress, started).run()
    except KeyboardInterrupt:
        raise Stopped(
            "interrupted",
            where=str(prepared.out),
            value=f"{len(build.done())} steps are kept",
            remedy="the same command with --resume goes on",
        ) from None


def fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Everything that a bundle's content depends on."""
    import torch

    versions = machine.versions()
    relevant = ("python", "torch", "transformers", "compressed-tensors", "safetensors", "numpy", *_GRAPH)
    return {
        "quantkit": quantkit.__version__,
        "model": prepared.source.ref,
        "source": prepared.source.sha256,
        "recipe": prepared.request.recipe.as_dict(),
        "calibration": prepared.calibration.sha256 if prepared.calibration else None,
        "scoring": prepared.scoring.sha256,
        "threads": torch.get_num_threads(),
        "isa": machine.isa(),
        "versions": {name: versions[name] for name in relevant if name in versions},
    }


def _refuse(decisions: list[Decision]) -> None:
    """`--strict`: a decision that the recipe did not ask for is an error."""
    unasked = [found for found in decisions if found.code not in {*ASKED, NOTE}]
    if unasked:
        first = unasked[0]
        raise GateError(
            "strict",
            where=first.where,
            value=f"{first.pass_}: {first.code}",
            rule=f"--strict allows no decision beyond the recipe; {first.reason} ({len(unasked)} in all)",
            remedy="write it into the recipe (keep, overrides, settings), or leave --strict out (--resume goes on)",
        )


def _finished(bundle: Bundle, prepared: Prepared) -> Compiled:
    """A resume of what had been finished already."""
    import torch

    manifest = bundle.manifest
    asked = tokens.without_paths(prepared.request.recipe.as_dict())
    ids = prepared.calibration.sha256 if prepared.calibration else None
    seen = manifest.calibration.ids_sha256 if manifest.calibration else None
    made = (manifest.recipe, manifest.model.source.sha256, seen, manifest.threads, manifest.isa)
    if made != (asked, prepared.source.sha256, ids, torch.get_num_threads(), machine.isa()):
        raise InputError(
            "out-exists",
            where=str(bundle.path),
            value="a finished bundle of another model, recipe, calibration or machine",
            rule="nothing is overwritten",
            remedy="choose another --out, or delete it",
        )
    if prepared.request.strict:
        _refuse(manifest.decisions)
    rows = [Row.model_validate(row) for row in bundle.measurements]
    seconds = {"quantize_cpu": None, "total": 0.0}
    return Compiled(bundle, rows, seconds, peak_bytes(), list(prepared.source.notes))


def peak_bytes() -> int:
    """The most that this process has had resident.

    `ru_maxrss` would also count what the parent had when it started this process: a notebook with a model in it.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def torch_threads() -> int:
    """Threads that torch computes with; a session that is scored takes as many."""
    import torch

    return torch.get_num_threads()


class _Compilation:
    """The stages of one compile, in order; the state between them is what is on disk."""

    def __init__(self, prepared: Prepared, build: Build, progress: Progress, started: float) -> None:
        self.prepared = prepared
        self.build = build
        self.progress = progress
        self.started = started
        self.quantize_cpu = 0.0

    def run(self) -> Compiled:
        """All stages."""
        prepared, request = self.prepared, self.prepared.request
        with stopping_when_full(self.build.folder):
            if prepared.steps or prepared.calibration is not None:
                self._quantize()
            records = [record for key, record in self.build.done().items() if key.startswith(("block-", "head"))]
            taken = [Decision.model_validate(x) for record in records for x in record.get("decisions", [])]
            decisions = [*prepared.decisions, *taken]
            layers = [LayerEntry.model_validate(x) for record in records for x in record["layers"]]
            self.quantize_cpu = prepared.cpu_seconds + sum(record["cpu_seconds"] for record in records)
            if request.strict:
                _refuse(decisions)
            decisions += self._export()
            files = inventory(self.build.bundle)
            subject = content_sha256(files)
            checks = self._check()
            rows = self._score(subject, layers, files)
            judged, unjudged = judge(prepared.request.recipe.gates, rows)
            timed, untimed = self._speed(subject, layers)
            rows += timed
            decisions += [*unjudged, *untimed]
            checks += judged
            write_rows(self.build.bundle / MEASUREMENTS, rows)
            failed = [check for check in judged if not check.ok]
            manifest = self._manifest(decisions, layers, checks, subject, "gate_failed" if failed else "complete")
            manifest = manifest.model_copy(update={"verdict": decide(rows, checks, layers, request.target)})
            manifest = self._written(manifest, rows)
        bundle = self.build.finish(manifest)
        warnings = list(prepared.source.notes)
        seconds = {"quantize_cpu": self.quantize_cpu, "total": time.perf_counter() - self.started}
        return Compiled(bundle, rows, seconds, peak_bytes(), warnings)

    def _quantize(self) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        from quantkit.model import finished
        from quantkit.pipeline.route import Rare
        from quantkit.pipeline.work import work

        prepared, build = self.prepared, self.build
        choice = prepared.request.recipe.calibration
        count = len(prepared.stream.block_names)
        start = sum(key.startswith("block-") for key in build.done())
        if start == count:
            self._finish_rest()
            return
        begun = time.process_time()
        hidden_file = build.work / f"hidden-{start - 1:04}.safetensors"
        states = load_file(hidden_file) if hidden_file.exists() else {}
        generator = torch.Generator().manual_seed(prepared.request.recipe.seed)
        probe_ids = torch.randint(0, tokens.vocabulary(prepared.source), _PROBE, generator=generator)
        self.progress.at("quantize", start / count, f"block {start + 1} of {count}")
        for worked in work(
            prepared.stream,
            prepared.steps,
            prepared.layers.schemes,
            prepared.calibration.ids if prepared.calibration else None,
            probe_ids=probe_ids,
            widest=prepared.layers.widest,
            dtype=getattr(torch, prepared.source.dtype),
            seed=prepared.request.recipe.seed,
            activations=prepared.layers.activations,
            cache=prepared.request.recipe.scheme.kv_cache,
            fuses=any(registry.load("export", step.name).fuses for step in prepared.request.recipe.export),
            start=start,
            hidden=states.get("hidden"),
            original=states.get("original"),
            rare=Rare(choice.expert_tokens, choice.experts),
        ):
            index = worked.block.index
            result = build.temporary("block.safetensors")
            named = {worked.block.full_name(name): tensor for name, tensor in worked.block.tensors.items()}
            finished.save(
                result, named, self._changed(worked), worked.block.input_scales(), worked.block.cache_scales()
            )
            files = {result: build.work / f"block-{index:04}.safetensors"}
            if worked.hidden is not None:
                outputs = {"hidden": worked.hidden, "original": worked.original}
                kept = build.temporary("hidden.safetensors")
                save_file({name: value for name, value in outputs.items() if value is not None}, kept)
                files[kept] = build.work / f"hidden-{index:04}.safetensors"
            before = build.work / f"hidden-{index - 1:04}.safetensors"
            remove = [before] if before.exists() else []
            now = time.process_time()
            record = {**self._record(worked), "cpu_seconds": now - begun}
            build.commit(f"block-{index:04}", record, files, remove=remove)
            begun = now
            self.progress.at("quantize", (index + 1) / count, f"block {min(index + 2, count)} of {count}")
        self._finish_rest()

    def _finish_rest(self) -> None:
        """Commit what lies outside the blocks: the head's codes, and what passes of scope `model` changed."""
        import torch

        from quantkit.model import finished

        stream, build = self.prepared.stream, self.build
        if self.prepared.layers.head is not None and "head" not in build.done():
            from quantkit.pipeline.head import quantize_head

            begun = time.process_time()
            tensor, entry = quantize_head(stream, self.prepared.layers)
            result = build.temporary("head.safetensors")
            finished.save(result, {entry.name: tensor}, {})
            record = {"layers": [entry.model_dump(mode="json")], "cpu_seconds": time.process_time() - begun}
            build.commit("head", record, {result: build.work / "head.safetensors"})
        if not stream.transforms or "rest" in build.done():
            return
        dtype = getattr(torch, self.prepared.source.dtype)
        model = stream.rest()
        found: dict[str, Any] = {}
        by_file: dict[str, Any] = {}
        for name in stream.rest_names():
            value = stream.value(model, name).to(dtype)
            if stream.files[name] in by_file and not torch.equal(by_file[stream.files[name]], value):
                raise InputError(
                    "tied-apart",
                    where=name,
                    value="a pass changed one of two tied tensors",
                    rule="tied tensors are stored once",
                    remedy="the pass has to say that it unties",
                )
            by_file[stream.files[name]] = value
            if not torch.equal(value, stream.tensor(name).to(dtype)):
                found[name] = value.contiguous()
        result = build.temporary("rest.safetensors")
        finished.save(result, {}, found)
        build.commit("rest", {}, {result: build.work / "rest.safetensors"})

    def _changed(self, worked: Worked) -> dict[str, Any]:
        """The block's parameters that folds changed, in the dtype they are stored in."""
        import torch

        stream = self.prepared.stream
        dtype = getattr(torch, self.prepared.source.dtype)
        quantized = {f"{name}.weight" for name in worked.block.tensors}
        found = {}
        for name, value in worked.block.module.named_parameters():
            full = worked.block.full_name(name)
            if name not in quantized and full in stream.files:
                stored = value.detach().to(dtype)
                if not torch.equal(stored, stream.tensor(full).to(dtype)):
                    found[full] = stored
        return found

    def _record(self, worked: Worked) -> dict[str, Any]:
        layers = []
        for name, tensor in worked.block.tensors.items():
            full = worked.block.full_name(name)
            static = worked.block.input_scales().get(full)
            entry = self.prepared.layers.entry(full, tensor, worked.errors.get(full), static)
            entry = entry.model_copy(update={"routed": worked.routed.get(full)})
            layers.append(entry.model_dump(mode="json"))
        return {
            "layers": layers,
            "fusions": [[worked.block.full_name(name) for name in members] for members in worked.block.fusions],
            "decisions": [decision.model_dump(mode="json", by_alias=True) for decision in worked.decisions],
        }

    def _results(self) -> Finished:
        from quantkit.model.finished import Finished

        names = ("block-*.safetensors", "head.safetensors", "rest.safetensors")
        files = sorted(path for name in names for path in self.build.work.glob(name))
        layers, cache = self.prepared.layers, self.prepared.request.recipe.scheme.kv_cache
        return Finished(files, layers.schemes, layers.activations, cache)

    def _export(self) -> list[Decision]:
        results = self._results()
        taken: list[Decision] = []
        for number, step in enumerate(self.prepared.request.recipe.export):
            self.progress.at("export", number / len(self.prepared.request.recipe.export), step.name)
            before = time.process_time()
            exporter = registry.load("export", step.name)
            taken += (
                exporter.write(self.build.bundle, self.prepared.source, self.prepared.stream, results, step.options)
                or []
            )
            if step.name == "checkpoint":
                self.quantize_cpu += time.process_time() - before
        self.progress.at("export", 1.0)
        return taken

    def _check(self) -> list[Check]:
        """Load every export again in somebody else's library and compare; a mismatch ends the compile."""
        checks: list[Check] = []
        results = self._results()
        for step in self.prepared.request.recipe.export:
            self.progress.at("check", 0.0, f"reloading the {step.name}")
            checks += registry.load("export", step.name).check(
                self.build.bundle,
                self.prepared.source,
                self.prepared.stream,
                results,
                step.options,
                blocks=self._affordable_blocks(),
            )
        self.progress.at("check", 1.0)
        failed = [check for check in checks if not check.ok]
        if failed:
            raise GateError(
                "check-failed",
                where=failed[0].where or failed[0].name,
                value=f"{failed[0].name} is {failed[0].value}",
                rule=f"at most {failed[0].limit}",
                remedy="the export is not what was decided on; nothing was delivered. Please report it",
            )
        return checks

    def _affordable_blocks(self) -> int:
        """How many blocks can be in memory at once without raising the peak that was reached already.

        At least one: memory then grows with the size of a block, never with their number.
        """
        import psutil

        count = len(self.prepared.stream.block_names)
        block = 4 * sum(rows * columns for rows, columns in self.prepared.layers.inside.values()) // count
        # embeddings and head come along, and logits of a few tokens
        rest = 4 * 2 * head_size(self.prepared)
        free: int = peak_bytes() - psutil.Process().memory_info().rss - rest
        # once as expected, once as loaded
        return min(count, max(1, free // max(2 * block, 1)))

    def _score(self, subject: str, layers: list[LayerEntry], files: list[Any]) -> list[Row]:
        """Accuracy of every export, each in its own runtime, and sizes."""
        from quantkit.measure import score
        from quantkit.measure.harm import through_depth
        from quantkit.model.stream import StreamedModel

        prepared, exports = self.prepared, self.prepared.request.recipe.export
        source, scoring = prepared.source, prepared.scoring
        original = StreamedModel(prepared.original) if prepared.stream.transforms else prepared.stream
        rows: list[Row] = []
        for number, step in enumerate(exports):
            runtime = registry.load("export", step.name).runtimes[0]
            self.progress.at("score", number / len(exports), f"{scoring.items} positions of {scoring.name}, {runtime}")
            candidate = registry.load("runtimes", runtime).open(self.build.bundle, torch_threads())
            found, items = score.rows(
                original,
                candidate,
                scoring,
                subject=subject,
                runtime=runtime,
                settings=score.settings(candidate),
                progress=functools.partial(self._scored, number, len(exports)),
            )
            if items is not None:
                items.save(self.build.bundle / ("items.safetensors" if number == 0 else f"items-{runtime}.safetensors"))
            rows += score.flagged(found, source.was)
            if number == 0 and layers:
                dense = candidate if isinstance(candidate, StreamedModel) else self._dense()
                harm = through_depth(
                    prepared.stream,
                    dense,
                    scoring.ids,
                    layers=[layer.name for layer in layers],
                    before=original if prepared.stream.transforms else None,
                )
                if items is not None:
                    where = worst_positions(items, scoring, source)
                    harm = harm.model_copy(update={"worst": where.worst, "worst_share": where.worst_share})
                (self.build.bundle / HARM).write_text(harm.model_dump_json() + "\n", encoding="utf-8")
            sizes = size_rows(
                layers,
                files,
                subject=subject,
                baseline=source.sha256,
                baseline_bytes=prepared.original.weights.total_bytes(),
                folder=folder_of(step.name),
            )
            if step.name == "checkpoint" and prepared.request.recipe.scheme.kv_cache is not None:
                rows += self._score_long(original, subject)
            rows += sizes if number == 0 else [row for row in sizes if row.name == "size.bytes"]
        return rows

    def _score_long(self, original: StreamedModel, subject: str) -> list[Row]:
        """What the quantized cache costs at a long context, beside what the rest costs there."""
        from quantkit.measure import long_context, score

        prepared = self.prepared
        recipe, runtime = prepared.request.recipe, registry.load("runtimes", "torch")
        self.progress.at("score", 0.9, f"up to {long_context.CONTEXT:,} tokens, with a quantized and a float cache")
        folder = self.build.bundle / "model"
        found = long_context.rows(
            original,
            {
                long_context.named(recipe.scheme.kv_cache): runtime.stream(folder),
                long_context.FLOAT: runtime.stream(folder, cache=False),
            },
            tokens.long(recipe, prepared.source, long_context.CONTEXT, long_context.SAMPLES),
            subject=subject,
            runtime=runtime.name,
            settings={"dtype": "float32"},
        )
        return score.flagged(found, prepared.source.was)

    def _dense(self) -> StreamedModel:
        """The model with the values that its codes stand for, where no checkpoint holds it."""
        from quantkit.export._values import Values

        return Values.of_results(self.prepared.source, self.prepared.stream, self._results()).stream

    def _scored(self, number: int, count: int, done: float) -> None:
        self.progress.at("score", (number + done) / count)

    def _speed(self, subject: str, layers: list[LayerEntry]) -> tuple[list[Row], list[Decision]]:
        if not times(self.prepared):
            return [], self._untimed()
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
        request, kind = self.prepared.request, self.prepared.source.kind
        exported = any(step.name == "onnx" for step in request.recipe.export)
        if not (request.speed and exported and self.prepared.layers.schemes):
            return []
        reason = f"target {request.target.name} is another machine" if kind == "decoder" else f"{kind}s are not timed"
        return [decision("measure", NOTE, "speed", reason)]

    def _written(self, manifest: Manifest, rows: list[Row]) -> Manifest:
        """The page and the card, and the manifest that lists them."""
        folder = self.build.bundle
        if manifest.layers or manifest.verdict is not None or any(row.runtime == "onnxruntime" for row in rows):
            made, missing = page(manifest, rows, self.prepared.source.notes, folder)
            manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
            if made is not None:
                (folder / REPORT).write_bytes(made)
                manifest = manifest.model_copy(update={"files": inventory(folder)})
        self._card(manifest, rows)
        return manifest.model_copy(update={"files": inventory(folder)})

    def _manifest(
        self, decisions: list[Decision], layers: list[LayerEntry], checks: list[Check], subject: str, state: Any
    ) -> Manifest:
        import torch

        prepared, recipe = self.prepared, self.prepared.request.recipe
        source, seen = prepared.source, prepared.calibration
        calibration = None
        if seen is not None:
            calibration = CalibrationEntry(
                set=seen.name,
                split=seen.split,
                ids_sha256=seen.sha256,
                samples=seen.ids.shape[0],
                tokens=seen.ids.shape[1],
            )
        origin = SourceEntry(ref=source.ref, sha256=source.sha256, dtype=source.dtype, was=source.was)
        return Manifest(
            quantkit=quantkit.__version__,
            content_sha256=subject,
            state=state,
            model=ModelEntry(name=source.name, kind=source.kind, source=origin),
            recipe=tokens.without_paths(recipe.as_dict()),
            target=prepared.request.target.as_dict(),
            calibration=calibration,
            seed=recipe.seed,
            threads=torch.get_num_threads(),
            isa=machine.isa(),
            device=dict(machine.device()),
            versions=machine.versions(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            layers=layers,
            files=inventory(self.build.bundle),
            decisions=decisions,
            checks=checks,
            verdict=None,
        )

    def _card(self, manifest: Manifest, rows: list[Row]) -> None:
        from quantkit.report.card import card

        text = card(manifest, rows, self.prepared.source.notes)
        (self.build.bundle / "README.md").write_text(text, encoding="utf-8")
