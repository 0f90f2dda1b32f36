"""What settings of a graph's compile are worth: ranges of activations, and the passes that choose codes.

    python benchmarks/graph_settings.py fashion-mnist-cnn
    python benchmarks/graph_settings.py efficientnet-lite0 --set ./.peers/photographs   # photo_crops.py makes it

Recipe `int8-network`, one thing changed at a time. Passes (`rtn`, `gptq`, `gptq` then `round`) are each solved anew, on
ranges by `mse`. Ranges are compared on one set of codes, those of `gptq`: what differs is where activations saturate.
Told are agreement with the float graph, the KL divergence of its classes' probabilities, right answers where there are
labels, and processor seconds of solving. Claim: neither range nor pass of the recipe is behind another by more than the
interval of its agreement; a table to choose by is what is wanted.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from harness.record import parsing, record, show, verdicts

from quantkit.graph.codes import solve
from quantkit.graph.pairs import qdq
from quantkit.model.source.alias import ALIASES
from quantkit.pipeline.graphs.answers import agreement, answers, kinds_of
from quantkit.pipeline.graphs.prepared import prepare
from quantkit.pipeline.graphs.quantized import BATCH, MODEL, QuantizedGraph
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import Request
from quantkit.scheme import Range

GPTQ = "gptq: {damping: 0.01, shrink: 0.5, correction: 1.0, ridge: 2.0}"
ROUND = "round: {iterations: 200, batch: 16, rate: 0.005, scale_rate: 0.0005}"
PASSES = {
    "rtn": "passes=[{rtn: {}}]",
    "gptq": f"passes=[{{{GPTQ}}}]",
    "gptq, round": f"passes=[{{{GPTQ}}}, {{{ROUND}}}]",
}


def accuracy(quantized: QuantizedGraph, made: Any, folder: Path) -> dict[str, Any]:
    """Figures of a graph with pairs, as a compile would tell them."""
    import onnx_ir as ir

    prepared = quantized.prepared
    ir.save(made, folder / MODEL)
    whole, found = prepared.graph.model, {}
    both = (answers(graph, prepared.scoring) for graph in (whole, folder / MODEL))
    for row in agreement(*both, prepared.scoring, kinds_of(whole), subject="", baseline=""):
        name = row.name.removeprefix("accuracy.")
        if name == "top1_agreement":
            name = "sure" if "surer_than" in row.settings else "agreement"
            found[f"{name}_ci95"] = row.ci95
        found[name] = row.value
    return {name: found[name] for name in ("agreement", "agreement_ci95", "sure", "kl", "top1") if name in found}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("model", choices=[name for name, alias in ALIASES.items() if alias.kind == "network"])
    parser.add_argument("--set", help="of images; the model's own")
    options = parser.parse_args()
    alias = ALIASES[options.model]
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for name, change in PASSES.items():
            request = Request.of(
                options.model,
                recipe="int8-network",
                calibration=options.set or alias.calibration,
                out=Path(folder) / "bundle",
                changes=[change],
            )
            prepared = prepare(request)
            begun = time.process_time()
            quantized = QuantizedGraph(prepared, Progress())
            seconds = time.process_time() - begun
            found = accuracy(quantized, quantized.model, Path(folder))
            rows.append({"passes": name, "range": "mse", **found, "cpu_s": seconds})
            print(rows[-1], flush=True)
            if name != "gptq":
                continue
            for how in get_args(Range):
                if how == "mse":
                    continue
                scheme = quantized.activations.model_copy(update={"range": how})
                whole, pairs = prepared.graph.model, quantized.placement
                ranges = solve.ranges(whole, pairs, list(prepared.calib.feeds(BATCH)), scheme)
                made = qdq.insert(whole, pairs, ranges, quantized.codes, quantized.sites, weight_type="int8")
                rows.append({"passes": name, "range": how, **accuracy(quantized, made, Path(folder))})
                print(rows[-1], flush=True)
    columns = {"passes": "", "range": "", "agreement": ".4f", "sure": ".4f", "kl": ".5f", "top1": ".4f", "cpu_s": ".0f"}
    title = f"{options.model}: {prepared.scoring.name}, {len(prepared.scoring)} images"
    show(title, rows, {key: f"{key}:{form}" if form else key for key, form in columns.items() if key in rows[0]})
    own = next(row for row in rows if row["passes"] == "gptq" and row["range"] == "mse")
    best = max(row["agreement"] for row in rows)
    claims = {"the recipe's range and passes are within its interval of the best": own["agreement_ci95"][1] >= best}
    settings = {
        "model": options.model,
        "set": prepared.scoring.name,
        "calibration": len(prepared.calib),
        "round": ROUND,
    }
    record(f"graph_settings-{options.model}", "; ".join(claims), rows, settings)
    return verdicts(claims)


if __name__ == "__main__":
    raise SystemExit(main())
