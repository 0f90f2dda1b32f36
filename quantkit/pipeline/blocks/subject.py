"""A transformer as the subject of a compile: each block goes through the passes and is committed before the next."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import (
    AdapterEntry,
    Bundle,
    CalibrationEntry,
    Decision,
    LayerEntry,
    ModelEntry,
    SourceEntry,
    WeightsEntry,
)
from quantkit.exporters import load_exporter, reader
from quantkit.formats import stored_bits
from quantkit.measurement.accuracy.purpose import TextResults
from quantkit.measurement.rows import Row
from quantkit.model.layouts import VLLM_ALONE
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines
from quantkit.pipeline.blocks.layers import account
from quantkit.pipeline.blocks.prepared import Prepared, estimate, fingerprint
from quantkit.pipeline.blocks.quantize import quantize
from quantkit.pipeline.blocks.recover import recover
from quantkit.pipeline.blocks.score import (
    AFTER,
    BEFORE,
    KL,
    OUTPUT,
    answering,
    few_ids,
    is_confirmed,
    original_of,
    score_exports,
    unscored,
)
from quantkit.pipeline.gates import demand
from quantkit.pipeline.measure import quick_times
from quantkit.pipeline.request import runs_here
from quantkit.pipeline.served import check as served_check
from quantkit.pipeline.subject import Subject
from quantkit.planning import efficiency
from quantkit.planning.assigned import takes_head
from quantkit.planning.compiling import WHOLE, Compiling, timed
from quantkit.report.bundle import figures
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.exporters.values import Values

# a checkpoint whose tensors were compared, but no logits
UNRUN = "reload-not-run"
# what is loaded lies in memory beside the files that it is read from, or beside what it is held against
_COPIES = 2


class TransformerSubject(Subject):
    """A transformer, block by block; the state between two steps is on disk."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared.request, prepared.out, prepared.decisions, prepared.source.notes)
        self.prepared, self.device = prepared, prepared.device

    @cached_property
    def expected(self) -> Compiling:
        """See `Subject`."""
        return estimate(self.prepared)

    @property
    def stages(self) -> Mapping[str, float]:
        """Stages with the number of their blocks, or exports."""
        blocks, exports = len(self.prepared.stream.block_names), len(self.request.recipe.export)
        quantizes = bool(self.prepared.steps) or self.prepared.calibration is not None
        builds = any(load_exporter(step.name).builds for step in self.request.recipe.export)
        stages = {"open": 1.0, "prove": 1.0, "quantize": blocks * quantizes}
        stages |= {"train": 2 * blocks * (self.prepared.training is not None), "export": exports, "check": exports}
        stages |= {"build": blocks * builds, "score": blocks, "speed": blocks * self.prepared.is_timed, "finish": 1.0}
        return {name: float(parts) for name, parts in stages.items() if parts}

    def fingerprint(self) -> dict[str, Any]:
        """See `Subject`."""
        return fingerprint(self.prepared)

    def demand_unchanged(self) -> None:
        """See `Subject`."""
        self.prepared.source.demand_unchanged()

    def entries(self) -> tuple[ModelEntry, CalibrationEntry | None]:
        """See `Subject`."""
        source, seen = self.prepared.source, self.prepared.calibration
        origin = SourceEntry(
            ref=source.ref,
            sha256=source.sha256,
            dtype=source.dtype,
            was=source.was,
            base=source.base.sha256 if source.base else None,
            adapters=[AdapterEntry.model_validate(adapter.about()) for adapter in source.adapters],
        )
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
            images=seen.images,
        )

    def described(self) -> dict[str, Any]:
        """See `Subject`."""
        source, layers, calibration = self.prepared.source, self.prepared.layers, self.prepared.calibration
        counts: dict[str, list[float]] = {}
        for name, scheme in layers.schemes.items():
            shape = layers.shapes[name]
            sums = counts.setdefault(figures.scheme_of(scheme.model_dump(mode="json")), [0, 0, 0.0])
            for place, amount in enumerate((1, shape[0] * shape[1], stored_bits(shape, scheme))):
                sums[place] += amount
        return {
            "model": {
                **{key: getattr(source, key) for key in ("name", "ref", "kind", "dtype", "was")},
                "bytes": source.bytes,
            },
            "schemes": [
                {"scheme": scheme, "layers": int(count), "bits_per_weight": bits / weights}
                for scheme, (count, weights, bits) in counts.items()
            ],
            "kept": [name for name in layers.shapes if name not in layers.schemes] if layers.schemes else [],
            "calibration": _set(calibration) if calibration else None,
            "scoring": _set(self.prepared.scoring),
        }

    def prove(self) -> None:
        """Prove before the first block that the stream for calibration and scores computes the same as the model."""
        from quantkit.model.streaming import own_forward

        self.watch.begin("prove")
        self.progress.at("prove", 0.0, "the stream against the model's own forward")
        original, scoring = self.prepared.unchanged(), self.prepared.scoring
        runs = original.as_it_runs()
        beside = (
            answering(runs, few_ids(scoring, runs.source), self.build.temporary(BEFORE)) if is_confirmed(runs) else None
        )
        if beside is None:
            reason = "plain transformers merges its experts, whose inputs the source rounds: no score was confirmed"
            self.decisions.append(decision("check", UNRUN, "score", reason))
        self.checks.append(own_forward.demand_equal(original, scoring.ids, self._fitting_blocks(), beside))
        seen = self.prepared.calibration
        if seen is not None and (row := original.pictures.first(seen.ids)) is not None:
            self.checks.append(own_forward.demand_equal_seeing(original, row, self._fitting_blocks()))
        if original.source.kind == "encoder":
            self.decisions += TextResults(original, scoring).decisions()
        machine.let_go()
        self.progress.at("prove", 1.0)

    def solve(self) -> None:
        """Put blocks through the passes, then what lies outside them."""
        prepared = self.prepared
        if prepared.steps or prepared.calibration is not None:
            self.watch.begin("quantize")
            with prepared.device.arithmetic():
                quantize(prepared, self.build, self.progress)
                if prepared.training is not None:
                    self.watch.begin("train")
                    recover(prepared, self.build, self.progress)
        done = sorted(self.build.done().items())  # blocks in their order, then the head
        records = [record for key, record in done if key.startswith(("block-", "head", "tower", "recovered"))]
        self.layers = [LayerEntry.model_validate(layer) for record in records for layer in record["layers"]]
        self.quantize_cpu = prepared.cpu_seconds + sum(record["cpu_seconds"] for record in records)
        self.decisions += [Decision.model_validate(one) for record in records for one in record.get("decisions", [])]

    def assist(self) -> None:
        """See `Subject`."""
        if self.prepared.steps or self.prepared.calibration is not None:
            with self.prepared.device.arithmetic():
                quantize(self.prepared, self.build, self.progress)

    def export(self) -> None:
        """See `Subject`."""
        steps = self.request.recipe.export
        for number, step in enumerate(steps):
            self.progress.at("export", number / len(steps), step.name)
            before = time.process_time()
            exporter = load_exporter(step.name)
            self.decisions += exporter.export(self.build.bundle / exporter.place, self._decided, step.settings) or []
            if exporter.stores == "tensors":
                self.quantize_cpu += time.process_time() - before
        self.progress.at("export", 1.0)

    def check(self) -> None:
        """Load every export again in somebody else's library and compare; a mismatch ends the compile."""
        from quantkit.exporters.checkpoint.reload import APART

        checks, prepared, blocks = [], self.prepared, self._fitting_blocks()
        whole, stream = blocks == len(prepared.stream.block_names), prepared.stream
        # a block may be called by several layers (ALBERT): all blocks are not the first few layers
        first = None if whole and len(stream.visits) > blocks else blocks
        for step in self.request.recipe.export:
            self.progress.at("check", 0.0, f"reloading the {step.name}")
            exporter, how = load_exporter(step.name), dict[str, Any](blocks=first)
            if exporter.stores == "tensors" and whole:
                folder, place = self.build.bundle / exporter.place, self.build.temporary(AFTER)
                how["beside"] = answering(
                    prepared.unchanged(), few_ids(prepared.scoring, prepared.source), place, folder
                )
            checks += exporter.check(self.build.bundle, self._decided, step.settings, **how)
        if self._is_served():
            self.progress.at("check", 0.0, "loading the checkpoint in vLLM")
            served, why = served_check(self.build.bundle / "model")
            checks += served
            self.decisions += [decision("check", NOTE, "model/", why)] if why else []
        self.progress.at("check", 1.0)
        demand(checks, "the export is not what was decided on; nothing was delivered. Please report it")
        self.checks += checks
        if any(check.name == APART for check in checks):
            reason = "its class makes no model of its first blocks alone, and there is no room for all of it"
            if any(taken.code == VLLM_ALONE for taken in self.decisions):
                reason = "transformers has no rule for its packed experts"
            reason += ": its tensors were compared, and no logits"
            self.decisions.append(decision("check", UNRUN, "model/", reason))

    def _is_served(self) -> bool:
        """Tell whether vLLM may run the checkpoint of a decoder: the target has cells of it."""
        tensors = any(load_exporter(step.name).stores == "tensors" for step in self.request.recipe.export)
        cells = any("vllm" in cells for cells in self.request.target.formats.values())
        return self.request.vllm and tensors and cells and self._decodes_alone()

    def _decodes_alone(self) -> bool:
        source = self.prepared.source
        return source.kind == "decoder" and not source.has_encoder

    def compile_engines(self) -> None:
        """See `Subject`."""
        built: dict[str, str] = {}
        for step in self.request.recipe.export:
            exporter = load_exporter(step.name)
            if exporter.builds:
                self.watch.begin("build")
                built |= exporter.build(
                    self.build.bundle, step.settings, lambda share, words: self.progress.at("build", share, words)
                )
        self.engines = built
        self.decisions += engines.notes(self.build.bundle, built)
        for inspected in engines.of_exports(self.request.recipe.export, self.build.bundle, self.layers, built):
            self.decisions += inspected.decisions()
            self.checks.append(inspected.check)

    def score(self, bundle: Bundle) -> list[Row]:
        """Score every export in its own runtime, confirmed by plain transformers where the model fits."""
        prepared, exports = self.prepared, self.request.recipe.export
        whole = self._fitting_blocks() == len(prepared.stream.block_names)
        rows, confirmed = score_exports(prepared, self.build, self.progress, bundle, self.engines, whole=whole)
        if not all(check.ok for check in confirmed):
            self.demand_unchanged()  # scores are then those of other weights
        demand(confirmed, "the figures are not those of the export; nothing was delivered. Please report it")
        self.checks += confirmed
        reason = ""
        if not whole:
            why = "plain transformers does not hold the whole model in the memory of this compile"
            reason = f"not confirmed outside of the stream: {why}"
        elif any(load_exporter(step.name).stores == "tensors" for step in exports) and not {KL, OUTPUT} & {
            check.name for check in confirmed
        }:
            why = "transformers leaves out some of what is quantized as it loads the checkpoint"
            reason = f"only the original's scores were confirmed: {why}"
        self.decisions += [decision("score", NOTE, "score", reason)] if reason else []
        self.decisions += unscored(exports, bundle.path)
        return rows

    def time(self, bundle: Bundle) -> list[Row]:
        """Time the ONNX graph, or the file, against the float model's, if there is one and it runs on this machine."""
        request, step = self.request, timed(self.request.recipe)
        if step is None or not (request.speed and self.prepared.layers.schemes):
            return []
        runtime = reader(step.name, step.options)
        if not self.prepared.is_timed:
            reason = f"target {request.target.name} is another machine"
            if runs_here(request.target):
                reason = str(load_runtime(runtime).why_not_here())
            self.decisions.append(decision("measure", NOTE, "speed", reason))
            return []
        self.watch.begin("speed")
        rows, untimed = quick_times(bundle, original_of(self.prepared), runtime, self.progress)
        self.decisions += untimed
        efficiency.keep([row.as_dict() for row in rows])
        return rows

    def weights(self) -> list[WeightsEntry]:
        """See `Subject`."""
        names = {layer.name for layer in self.layers}
        return account(self.prepared.stream, names, self.decisions, head=takes_head(self.request.recipe))

    @cached_property
    def _decided(self) -> Values:
        return self.prepared.values(self.build, written=True)

    def _fitting_blocks(self) -> int:
        """Count the blocks for plain transformers to have in memory at once: all of a small model, else what fits into
        the peak of the rest.

        The count depends on sizes and on memory that is free apart from this process; earlier use by this process does
        not matter. It is at least one: memory then grows with the size of a block, never with the number of blocks.
        """
        import psutil

        stream, source = self.prepared.stream, self.prepared.source
        blocks = [sum(value.numel() for value in block.parameters()) for block in stream.blocks]
        files = {stream.files[name] for name in stream.rest_names()}
        outside = sum(math.prod(source.weights.entries[name].shape) for name in files)
        begun, memory = self.expected.memory.get("open", 0.0), psutil.Process().memory_info()
        # pages of mapped files are resident and available, both at once
        free = machine.memory_available() + int(memory.rss - getattr(memory, "shared", 0)) - begun
        if 4 * (sum(blocks) + outside) <= min(WHOLE, machine.memory_limit() // 4, free / 2):
            return len(blocks)
        config = {**source.config, **(source.config.get("text_config") or {})}
        head = int(config.get("vocab_size", 0)) * int(config.get("hidden_size", config.get("n_embd", 0)))
        # what lies outside the blocks comes along, and logits of a few tokens
        room = min(self.expected.peak - begun, free) // (4 * _COPIES) - max(outside, 2 * head)
        return max(1, sum(together <= room for together in itertools.accumulate(blocks)))


def _set(tokens: TokenSet) -> dict[str, Any]:
    about: dict[str, Any] = {"set": tokens.name, "split": tokens.split}
    if tokens.split == "eval" and tokens.pairs is not None:
        return about | {"pairs": tokens.items}
    samples, length = tokens.ids.shape
    more = {"begins": tokens.begins, "generated": tokens.generated or None, "images": tokens.images}
    about |= {"samples": samples, "tokens": length}
    return about | {name: value for name, value in more.items() if value is not None}
