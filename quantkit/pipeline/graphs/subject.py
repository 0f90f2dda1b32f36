"""A float ONNX graph as the subject of a compile: products solved one after another, each committed.

What a recipe's passes mean here: `gptq`, `rtn` and `hqq` choose codes (convolutions as products of patches), `round`
moves them, biases are always corrected, whether `bias_correct` stands there or not. The others are declined, each with
a decision and the reason that it states itself (`on_graphs`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit._version import __version__
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
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.rows import Row
from quantkit.model.device import ComputeDevice
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines as engine
from quantkit.pipeline.blocks.layers import account_graph
from quantkit.pipeline.graphs.mixed import NAME, mix
from quantkit.pipeline.graphs.network import Network
from quantkit.pipeline.graphs.prepared import PreparedGraph, wanted
from quantkit.pipeline.graphs.quantized import QuantizedGraph, Steps, estimate
from quantkit.pipeline.measure import MeasuredAgainst, measure, quick_times
from quantkit.pipeline.progress import Progress, Stages
from quantkit.pipeline.request import Request, runs_here
from quantkit.pipeline.subject import Engines, Scores
from quantkit.pipeline.verdict import HARM, RUNTIME
from quantkit.planning.compiling import Compiling

# packages that a graph's bytes depend on
_PACKAGES = ("python", "torch", "onnx", "onnx-ir", "onnxruntime", "numpy", "safetensors")


class GraphSubject:
    """See `pipeline/subject.py`."""

    def __init__(self, prepared: PreparedGraph) -> None:
        self.prepared = prepared
        self.request: Request = prepared.request
        self.out: Path = prepared.out
        self.decisions: list[Decision] = prepared.decisions
        self.notes: Sequence[str] = prepared.graph.notes
        self.device = ComputeDevice()

    @cached_property
    def expected(self) -> Compiling:
        """What the compile will take of memory and disk."""
        return estimate(self.prepared)

    @property
    def stages(self) -> Mapping[str, float]:
        """In order, with the number of their parts: products, or samples."""
        prepared, activations = self.prepared, self.request.recipe.scheme.activations
        products, mixed = float(len(prepared.sites)), prepared.held is not None
        ranges = products if activations is not None and not activations.dynamic else 0.0
        speed = products if self.request.speed and runs_here(self.request.target) else 0.0
        stages = {"open": 1.0, "ranges": ranges, "codes": products, NAME: 4 * products * mixed}
        stages |= {"score": products, "speed": speed, "finish": 1.0}
        return {name: parts for name, parts in stages.items() if parts}

    def fingerprint(self) -> dict[str, Any]:
        """Everything that a bundle's content depends on, and what its choices were made on."""
        import torch

        prepared, versions, target = self.prepared, machine.versions(), self.request.target
        return {
            "quantkit": __version__,
            "source": prepared.graph.sha256,
            "recipe": self.request.recipe.as_dict(),
            "code": self.request.recipe.outside(),
            "calibration": prepared.calib.sha256,
            "scoring": prepared.scoring.sha256,
            "held": prepared.held.sha256 if prepared.held is not None else None,
            # kinds of codes are the target's
            "target": {"name": target.name, "build": target.build},
            "threads": torch.get_num_threads(),
            "isa": machine.isa(),
            "versions": {name: versions[name] for name in _PACKAGES if name in versions},
        }

    def demand_unchanged(self) -> None:
        """Of the graph, and of the weights beside it."""
        self.prepared.graph.demand_unchanged()

    def entries(self) -> tuple[ModelEntry, CalibrationEntry]:
        """The model, and what it is calibrated on, as a manifest lists them."""
        graph, calib = self.prepared.graph, self.prepared.calib
        origin = SourceEntry(ref=self.prepared.ref, sha256=graph.sha256, dtype="float32", was=None)
        seen: dict[str, Any] = {"set": calib.name, "split": calib.split, "ids_sha256": calib.sha256}
        # samples of a graph are not cut into tokens
        return (
            ModelEntry(name=graph.name, kind=graph.kind, source=origin),
            CalibrationEntry(**seen, samples=len(calib), tokens=0),
        )

    def planned(self) -> dict[str, Any]:
        """What the compile would do, as JSON."""
        from quantkit.pipeline.dry_run import planned_graph

        return planned_graph(self.prepared)

    def work(self, build: Build, progress: Progress, stages: Stages) -> GraphWork:
        """The work on it, in a build."""
        return GraphWork(self.prepared, build, progress, stages)


class GraphWork:
    """See `pipeline/subject.py`; what is solved stands in the build's journal (`steps.py`)."""

    quantized: Network | QuantizedGraph

    def __init__(self, prepared: PreparedGraph, build: Build, progress: Progress, stages: Stages) -> None:
        self.prepared, self.build, self.progress, self.stages = prepared, build, progress, stages
        self.steps = Steps(build)
        self.quantize_cpu = 0.0
        self._begun = time.process_time()

    @property
    def layers(self) -> list[LayerEntry]:
        """Products that are quantized."""
        return self.quantized.layers()

    @property
    def file(self) -> Path:
        """What is written."""
        return self.build.bundle / self.quantized.file

    def prove(self) -> list[Check]:
        """Nothing: each fusion was proved in ONNX Runtime when the graph was opened."""
        return []

    def solve(self) -> list[Decision]:
        """Ranges, then every product; then what the gates need is put back in floats, if the recipe asks for that."""
        self.stages.begin("quantize")
        if wanted(self.prepared.request.recipe) is not None:
            self.quantized = Network(self.prepared, self.progress, self.steps)
            return list(self.quantized.decisions)
        self.quantized = quantized = QuantizedGraph(self.prepared, self.progress, self.steps)
        taken = self._mix(quantized)
        return [*quantized.decisions, *taken]

    def _mix(self, quantized: QuantizedGraph) -> list[Decision]:
        """Mixed precision; the search goes into the bundle."""
        recipe, held = self.prepared.request.recipe, self.prepared.held
        settings = next((step.settings for step in recipe.passes if step.name == NAME), None)
        if settings is None or held is None:
            return []
        found = mix(quantized, held, settings, self.progress)
        quantized.take(found.solved)
        (self.build.bundle / HARM).write_text(Harm(mixed=found.mixed).model_dump_json() + "\n", encoding="utf-8")
        return found.decisions

    def export(self) -> list[Decision]:
        """The graph with its pairs, or the network of an engine."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.quantized.save(self.file)
        self.quantize_cpu = self.steps.cpu_before + time.process_time() - self._begun
        return []

    def check(self) -> tuple[list[Check], list[Decision]]:
        """The file, reloaded in ONNX Runtime."""
        return self.quantized.checks(self.file)

    def engines(self) -> Engines:
        """The engine of a network, if the recipe asks for one."""
        made = self.quantized.build(self.build.bundle)
        return Engines(made, engine.notes(self.build.bundle, made))

    def score(self, bundle: Bundle, engines: Mapping[str, str]) -> Scores:
        """The file against the float graph, in ONNX Runtime."""
        scoring, runner = self.prepared.scoring, self.quantized.runner(self.file)
        self.progress.at("score", 0.0, f"{len(scoring)} samples of {scoring.name}")
        rows, _ = measure(bundle, self.original, RUNTIME, candidate=runner, progress=self.progress)
        return Scores(rows, (), self.quantized.notes())

    def time(self, bundle: Bundle) -> tuple[list[Row], list[Decision]]:
        """Against the float graph as it came, where the target is this machine; what prevents it is a decision."""
        if not self.request.speed:
            return [], []
        if not runs_here(self.request.target):
            return [], [decision("measure", NOTE, "speed", f"target {self.request.target.name} is another machine")]
        self.stages.begin("speed")
        return quick_times(bundle, self.original, RUNTIME, self.progress)

    @property
    def request(self) -> Request:
        """As it is compiled."""
        return self.prepared.request

    @property
    def original(self) -> MeasuredAgainst:
        """The float graph, and the samples that score."""
        prepared, graph = self.prepared, self.prepared.graph
        return MeasuredAgainst(graph.sha256, graph=graph, samples=prepared.scoring, cost=prepared.cost)

    def weights(self, decisions: Sequence[Decision]) -> list[WeightsEntry]:
        """Return what became of its products' weights."""
        names = [layer.name for layer in self.layers]
        return account_graph(self.prepared.graph.model, names, decisions) if names else []
