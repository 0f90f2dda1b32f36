"""A float ONNX graph as the subject of a compile: products solved one after another, each committed.

On a graph `gptq`, `rtn` and `hqq` choose codes (convolutions as products of patches), and `round` moves them. Biases
are always corrected, with or without `bias_correct`. Other passes are declined: a decision gives the reason that the
pass states in `on_graphs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle, CalibrationEntry, ModelEntry, SourceEntry, WeightsEntry
from quantkit.exporters import load_exporter
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.rows import Row
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines, subject
from quantkit.pipeline.blocks.layers import account_graph, left_in_floats
from quantkit.pipeline.graphs.mixed import NAME, mix
from quantkit.pipeline.graphs.network import Network
from quantkit.pipeline.graphs.prepared import EXPORT, PreparedGraph, wanted
from quantkit.pipeline.graphs.quantized import QuantizedGraph, Steps, estimate, sizes
from quantkit.pipeline.measure import MeasuredAgainst, measure, quick_times
from quantkit.pipeline.request import runs_here
from quantkit.pipeline.verdict import HARM, RUNTIME
from quantkit.planning.compiling import Compiling
from quantkit.report.bundle import figures
from quantkit.runtimes import load_runtime
from quantkit.runtimes.tensorrt.file import FOLDER

# packages that a graph's bytes depend on
_PACKAGES = ("python", "torch", "onnx", "onnx-ir", "onnxruntime", "numpy", "safetensors")


class GraphSubject(subject.Subject):
    """A float ONNX graph; its solved steps stand in the build's journal (`Steps`)."""

    quantized: Network | QuantizedGraph

    def __init__(self, prepared: PreparedGraph) -> None:
        super().__init__(prepared.request, prepared.out, prepared.decisions, prepared.graph.notes)
        self.prepared = prepared

    @cached_property
    def expected(self) -> Compiling:
        """See `Subject`."""
        return estimate(self.prepared)

    @property
    def stages(self) -> Mapping[str, float]:
        """Stages with the number of their products, or samples."""
        prepared, activations = self.prepared, self.request.recipe.scheme.activations
        products, mixed = float(len(prepared.sites)), prepared.held is not None
        ranges = products if activations is not None and not activations.dynamic else 0.0
        speed = products if self.request.speed and runs_here(self.request.target) else 0.0
        stages = {"open": 1.0, "ranges": ranges, "codes": products, NAME: 4 * products * mixed}
        stages |= {"score": products, "speed": speed, "finish": 1.0}
        return {name: parts for name, parts in stages.items() if parts}

    def fingerprint(self) -> dict[str, Any]:
        """Return all inputs of a bundle's content, with the data behind its choices."""
        prepared, target = self.prepared, self.request.target
        return subject.fingerprint(
            self.request,
            _PACKAGES,
            source=prepared.graph.sha256,
            calibration=prepared.calib.sha256,
            scoring=prepared.scoring.sha256,
            held=prepared.held.sha256 if prepared.held is not None else None,
            # kinds of codes are the target's
            target={"name": target.name, "build": target.build},
        )

    def demand_unchanged(self) -> None:
        """See `Subject`; of the weights beside the graph, too."""
        self.prepared.graph.demand_unchanged()

    def entries(self) -> tuple[ModelEntry, CalibrationEntry]:
        """See `Subject`."""
        graph, calib = self.prepared.graph, self.prepared.calib
        origin = SourceEntry(ref=self.prepared.ref, sha256=graph.sha256, dtype="float32", was=None)
        seen: dict[str, Any] = {"set": calib.name, "split": calib.split, "ids_sha256": calib.sha256}
        # samples of a graph are not cut into tokens
        calibration = CalibrationEntry(**seen, samples=len(calib), tokens=0)
        return ModelEntry(name=graph.name, kind=graph.kind, source=origin), calibration

    def described(self) -> dict[str, Any]:
        """See `Subject`; with the multiply-accumulates of one sample and the runtime."""
        graph, scheme = self.prepared.graph, self.request.recipe.scheme
        weights, scales = sizes(self.prepared)
        macs, chosen = self.prepared.cost.macs, {site.name for site in self.prepared.sites}
        stored = []
        if scheme.weights is not None:
            inputs = scheme.activations
            stored.append(
                {
                    "scheme": figures.scheme_of(scheme.weights.model_dump(mode="json")),
                    "activations": inputs.model_dump(mode="json", exclude_none=True) if inputs else None,
                    "layers": len(chosen),
                    "bits_per_weight": (8 * weights + 32 * scales) / weights,
                }
            )
        model = {"name": graph.name, "ref": self.prepared.ref, "kind": graph.kind, "dtype": "float32"}
        sets = {"calibration": self.prepared.calib, "scoring": self.prepared.scoring}
        return {
            "model": {**model, "was": None, "bytes": graph.bytes},
            "schemes": stored,
            "kept": [name for name in macs if name not in chosen],
            "floats": left_in_floats(account_graph(graph.model, chosen, self.decisions)),
            "macs": {"quantized": sum(macs[name] for name in chosen), "all": sum(macs.values())},
            **{name: {"set": one.name, "split": one.split, "samples": len(one)} for name, one in sets.items()},
            "runtime": RUNTIME,
        }

    def solve(self) -> None:
        """Observe ranges, then solve every product; with `mixed`, put back into floats what the gates need."""
        self.watch.begin("quantize")
        recipe, held = self.request.recipe, self.prepared.held
        self._begun, self._steps = time.process_time(), Steps(self.build)
        kind = QuantizedGraph if wanted(recipe) is None else Network
        self.quantized = kind(self.prepared, self.progress, self._steps)
        settings = next((step.settings for step in recipe.passes if step.name == NAME), None)
        taken = []
        if isinstance(self.quantized, QuantizedGraph) and settings is not None and held is not None:
            mixture = mix(self.quantized, held, settings, self.progress)
            self.quantized.take(mixture.solved)
            (self.build.bundle / HARM).write_text(Harm(mixed=mixture.mixed).model_dump_json() + "\n", encoding="utf-8")
            taken = mixture.decisions
        self.decisions += [*self.quantized.decisions, *taken]
        self.layers = self.quantized.layers()

    @property
    def file(self) -> Path:
        """Written file: the graph with its pairs, or the network of an engine."""
        return self.build.bundle / self.quantized.file

    def export(self) -> None:
        """See `Subject`."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.quantized.save(self.file)
        self.quantize_cpu = self._steps.cpu_before + time.process_time() - self._begun

    def check(self) -> None:
        """Reload the file in ONNX Runtime. Raises GateError."""
        checks, taken = self.quantized.checks(self.file)
        self.checks += checks
        self.decisions += taken

    def compile_engines(self) -> None:
        """See `Subject`."""
        if step := wanted(self.request.recipe):
            self.engines = load_exporter(EXPORT).build(
                self.build.bundle, step.settings, lambda share, words: self.progress.at("build", share, words)
            )
            self.decisions += engines.notes(self.build.bundle, self.engines)

    def score(self, bundle: Bundle) -> list[Row]:
        """Score the file against the float graph, in ONNX Runtime: a network as it is written, on the CPU."""
        from quantkit.graph.run import Runner

        scoring, step = self.prepared.scoring, wanted(self.request.recipe)
        runner = Runner(self.file, literal=step is not None)
        self.progress.at("score", 0.0, f"{len(scoring)} samples of {scoring.name}")
        rows, _ = measure(bundle, self.original, RUNTIME, candidate=runner, progress=self.progress)
        if step is not None:
            why = load_runtime(step.settings.library).why_not_here() or "engines of graphs are not run yet"
            why = why if step.settings.engine else "none was built (engine: false)"
            reason = f"not run: {why}; scored is its network, in ONNX Runtime"
            self.decisions.append(decision("measure", NOTE, FOLDER, reason))
        return rows

    def time(self, bundle: Bundle) -> list[Row]:
        """Time the file against the original float graph, if the target is this machine."""
        if not self.request.speed:
            return []
        if not runs_here(self.request.target):
            reason = f"target {self.request.target.name} is another machine"
            self.decisions.append(decision("measure", NOTE, "speed", reason))
            return []
        self.watch.begin("speed")
        rows, untimed = quick_times(bundle, self.original, RUNTIME, self.progress)
        self.decisions += untimed
        return rows

    @property
    def original(self) -> MeasuredAgainst:
        """Float graph, and the scoring samples."""
        prepared, graph = self.prepared, self.prepared.graph
        return MeasuredAgainst(graph.sha256, graph=graph, samples=prepared.scoring, cost=prepared.cost)

    def weights(self) -> list[WeightsEntry]:
        """Account for its products' weights; nothing where a graph's own constants are all there is."""
        names = [layer.name for layer in self.layers]
        return account_graph(self.prepared.graph.model, names, self.decisions) if names else []
