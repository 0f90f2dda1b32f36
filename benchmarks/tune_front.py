"""Does a mixture of formats beat one format at equal bits? SmolLM2-135M at three budgets.

    python benchmarks/tune_front.py
    python benchmarks/tune_front.py --budgets 3.9 4.3125 4.6 --samples 8

Harms are measured once, on the `tune` split; each budget is then solved, compiled and scored on `eval`, which guided
nothing, and beside it the best single scheme of no more bits (the base recipe `gptq-int4` as it is, with zero points,
counts as one). A packed checkpoint takes several schemes only without zero points, so the mixtures are symmetric.

Candidates are int3, int4 and int8 in groups of 64. The model comes from a 4-bit file (GGUF Q4_1, groups of 32 with
offsets in floats); that grid would be lossless, and is none of them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, envelope, quantkit, run
from harness.record import layout, parsing, record, show, verdicts

BUDGETS = (3.9, 4.3125, 4.6)


def line(front: dict[str, Any], cpu: float | None) -> dict[str, Any]:
    chosen, uniform = front["chosen"], front["uniform"]
    return (
        {"budget": front["budget"]["bits"], "bits": chosen["bits"], "units": chosen["units"]}
        | {"predicted": chosen["predicted"], "measured": chosen["measured"], "held_out": chosen["held_out"]}
        | {"held_out_ci95": chosen["held_out_ci95"], "uniform": uniform and uniform["name"]}
        | {"uniform_bits": uniform and uniform["bits"], "uniform_measured": uniform and uniform["measured"]}
        | {"uniform_held_out": uniform and uniform["held_out"]}
        | {"uniform_held_out_ci95": uniform and uniform["held_out_ci95"], "factor": front["factor"]}
        | {"cpu_seconds": cpu, "texts": front["texts"]}
    )


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipe", default="gptq-int4")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="bits a weight")
    parser.add_argument("--formats", default="int3,int4,int8")
    parser.add_argument("--samples", type=int, help="calibration sequences; default: the recipe's own")
    parser.add_argument("--fronts", nargs="+", type=Path, help="folders of searches that were made already")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    if options.fronts:
        rows = [line(json.loads((folder / "front.json").read_text()), None) for folder in options.fronts]
    else:
        change = ["--set", f"calibration.samples={options.samples}"] if options.samples else []
        with tempfile.TemporaryDirectory() as place:
            for budget in options.budgets:
                arguments = ["--budget", f"bits={budget}", "--recipe", options.recipe, "--formats", options.formats]
                out = Path(place) / f"{budget:g}"
                done = run(quantkit("tune", options.model, *arguments, *change, "--out", out, "--json"))
                result = envelope(done)["result"]
                if result is None:
                    raise SystemExit(done.err[-2000:])
                rows.append(line(result, done.cpu))
    columns = layout(
        "budget:.4g | bits:.4f | predicted=sum of harms:.4f | measured=KL, tune split:.4f | "
        "held_out=KL, eval split:.4f | uniform=one scheme | uniform_bits=its bits:.4f | "
        "uniform_held_out=its KL, eval split:.4f | cpu_seconds=CPU s:.0f"
    )
    show(f"{options.model}, {options.recipe}, {THREADS} threads", rows, columns)
    settings = {
        "model": options.model,
        "recipe": options.recipe,
        "formats": options.formats,
        "samples": options.samples,
    } | {"threads": THREADS, "cpu_seconds": "of the first budget with the harms, of the others without"}
    claim = "at equal bits a tuned mixture has a lower KL than the best single scheme"
    record("tune-front", claim, rows, settings)
    checks = {}
    for row in rows:
        if row["uniform"] and row["uniform_bits"] >= 0.97 * row["bits"]:  # at equal bits
            says = f"{row['bits']:.4f} bits: {row['held_out']:.4f} < {row['uniform']} {row['uniform_held_out']:.4f}"
            checks[says] = row["held_out"] < row["uniform_held_out"]
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
