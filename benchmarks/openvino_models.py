"""OpenVINO's times of a bundle against ONNX Runtime's of the same codes, and against both runtimes' floats.

    quantkit compile smollm2-135m --recipe int4-best --no-speed --out b
    quantkit export b --to openvino
    python benchmarks/openvino_models.py b [--network]

Two sides are timed in turns, each pair in a process of its own, as `quantkit measure` does: steps of 1 and 16 sequences
with 128 tokens in the cache and a prompt of 256; of a network one sample and 32. Ratios are to what is named, above 1
where OpenVINO is faster; both round inputs of products with codes to 8 bits.

No claim: it says where a processor is served better by which.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness.process import THREADS
from harness.record import parsing, record, show

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.measurement.timing.speed import Samples, SpeedJob, SpeedSide, run
from quantkit.pipeline import verdict

OPENVINO, ORT = "openvino", verdict.RUNTIME


def jobs_of_text(bundle: Bundle, seconds: float) -> dict[str, SpeedJob]:
    from quantkit.model.source.open import open_model
    from quantkit.pipeline.baseline import float_export

    subject, form = bundle.manifest.content_sha256, verdict.format_of(bundle.manifest.layers)
    source = open_model(bundle.manifest.model.source.ref.removeprefix("alias:"))
    ours = SpeedSide(str(bundle.path / OPENVINO), subject, form, runtime=OPENVINO)
    others = {
        f"ONNX Runtime, {form}": SpeedSide(str(bundle.path / "onnx"), f"{subject}, onnx", form),
        "ONNX Runtime, float32": SpeedSide(str(float_export(source, "onnx", {})), source.sha256, "float32"),
        "OpenVINO, float32": SpeedSide(
            str(float_export(source, OPENVINO, {})), source.sha256, "float32", runtime=OPENVINO
        ),
    }
    plan = TimingPlan((1, 16), (128,), (256,), (1,), seconds, cell_seconds=seconds, rounds=4)
    return {name: SpeedJob(ours, theirs, THREADS, plan) for name, theirs in others.items()}


def jobs_of_network(bundle: Bundle, seconds: float, folder: Path) -> dict[str, SpeedJob]:
    from quantkit.graph.open import open_graph
    from quantkit.graph.sites import sites
    from quantkit.model.source.alias import ALIASES, materialize
    from quantkit.pipeline.graphs.answers import cost
    from quantkit.pipeline.graphs.bundles import samples_of

    subject, form = bundle.manifest.content_sha256, verdict.format_of(bundle.manifest.layers)
    alias = ALIASES[bundle.manifest.model.source.ref.removeprefix("alias:")]
    graph, samples = open_graph(materialize(alias) / "model.onnx"), samples_of(bundle, None)
    costs = cost(graph.model, sites(graph.model), samples.first(2))
    np.savez(folder / "samples.npz", allow_pickle=False, **samples.first(32))
    given = Samples(str(folder / "samples.npz"), float(sum(costs.macs.values())), float(costs.outputs))
    ours = SpeedSide(str(bundle.path / OPENVINO / "model.xml"), subject, form, runtime=OPENVINO)
    others = {
        f"ONNX Runtime, {form}": SpeedSide(str(bundle.path / "onnx" / "model.onnx"), f"{subject}, onnx", form),
        "ONNX Runtime, float32": SpeedSide(str(graph.path), graph.sha256, "float32", graph.bytes),
    }
    plan = TimingPlan((), (), (1,), (1, 32), seconds, cell_seconds=seconds, rounds=4)
    return {name: SpeedJob(ours, theirs, THREADS, plan, given) for name, theirs in others.items()}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each pair")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = (
            jobs_of_network(bundle, options.seconds, Path(folder))
            if options.network
            else jobs_of_text(bundle, options.seconds)
        )
        for name, job in jobs.items():
            for row in run(job):
                if not row.name.startswith("latency.") or row.baseline is None or row.baseline.ratio_ci95 is None:
                    continue
                low, high = row.baseline.ratio_ci95
                step = row.name.removeprefix("latency.")
                rows.append(
                    {"against": name, "step": step, "batch": row.batch, **(row.shape or {})}
                    | {"ms": 1e3 * row.value, "ratio": row.baseline.ratio, "ratio_ci95": [low, high]}
                    | {"aa_spread": row.aa_spread, "interval": f"{low:.2f} to {high:.2f}"}
                )
    model = bundle.manifest.model.name
    columns = {"against": "against", "step": "step", "batch": "batch:d", "new_tokens": "tokens:d"}
    columns |= {"ms": "OpenVINO, ms:.1f", "ratio": "times as fast:.2f", "interval": "95 %"}
    show(f"{model} in OpenVINO, {THREADS} threads, {machine.cpu_name()}, {machine.isa()}", rows, columns)
    settings = {"isa": machine.isa(), "threads": THREADS, "versions": machine.versions()}
    record(f"openvino-{model}", "no claim", rows, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
