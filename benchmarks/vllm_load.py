"""What do bundles deliver in vLLM's server, beside their originals?

    python benchmarks/vllm_load.py --work DIR --model smollm2-135m --rates 1,2,4,8 --requests 40
    python benchmarks/vllm_load.py --work DIR --model qwen2.5-coder-0.5b --rates 0.5,1 --requests 12

Compiles what DIR lacks under each of `--recipes`, then runs `quantkit measure BUNDLE --load`: the original and the
bundle, A B B A, 256 prompt tokens and 128 output tokens a request. No claim: the figures are this machine's. Needs
`quantkit runtime add vllm`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness.record import parsing, record, show

from quantkit import machine

NAMES = {"load.ttft": ("p50", "p99"), "load.tpot": ("p50", "p99"), "load.e2el": ("p50",), "load.goodput": (None,)}


def quantkit(*words: str) -> Any:
    """Return the result of a command; an undecided one is a result."""
    command = machine.python("-m", "quantkit", *words, "--json")
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    if answer["result"] is None:
        raise SystemExit(answer["error"]["message"] if "message" in answer["error"] else str(answer["error"]))
    return answer["result"]


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", default="awq-int4,int8-dynamic")
    parser.add_argument("--rates", default="1,2,4")
    parser.add_argument("--requests", default="60")
    parser.add_argument("--slo", default="ttft=1s,tpot=100ms")
    options = parser.parse_args()
    model, rows, verdicts = options.model, [], {}
    for recipe in options.recipes.split(","):
        name = f"{Path(model).name}--{recipe}"
        bundle = options.work / name
        if not bundle.exists():
            quantkit("compile", model, "--recipe", recipe, "--out", str(bundle), "--no-speed")
        words = ["--load", f"rate={options.rates}", "--requests", options.requests, "--slo", options.slo]
        result = quantkit("measure", str(bundle), "--baseline", model, *words)
        verdicts[name] = result["load"]
        rows += [{"bundle": name, **row} for row in result["measurements"]]
        print(f"{name}: {result['load']}", flush=True)
    table = [
        {
            "bundle": row["bundle"],
            "rate": row["settings"]["rate"],
            "what": row["name"],
            "at": row["settings"].get("quantile"),
        }
        | {"original": row["baseline"]["value"], "this": row["value"], "ci95": row["ci95"]}
        | {"gain": row["baseline"]["ratio"], "gain_ci95": row["baseline"]["ratio_ci95"], "aa": row["aa_spread"]}
        for row in rows
        if row["settings"].get("quantile") in NAMES.get(row["name"], ())
    ]
    columns = {"bundle": "bundle", "rate": "rate:g", "what": "what", "at": "at", "original": "original:.3g"}
    columns |= {"this": "this:.3g", "ci95": "95 %:.3g", "gain": "gain:.2f", "gain_ci95": "95 %:.2f", "aa": "A/A:.2f"}
    show("under load in vLLM's server; seconds, goodput in requests a second", table, columns)
    settings = {"rates": options.rates, "requests": options.requests, "slo": options.slo, "verdicts": verdicts}
    claim = "no claim: what bundles deliver in vLLM's server under load"
    record(f"vllm-load-{Path(model).name}", claim, rows, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
