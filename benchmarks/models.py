"""What each recipe costs on three language models: the expected losses, the gates, the memory that was forecast.

    python benchmarks/models.py                                          all of it: hours
    python benchmarks/models.py --models smollm2-135m --recipes awq-int4 nf4
    python benchmarks/models.py --rows rows.json                         goes on where a run with this file was stopped
    python benchmarks/models.py --rows rows.json --table                 docs/models-measured.md from them, no compile

`make models` fetches the two models that no package holds whole. Every compile runs in a process of its own at 2
threads, with the shipped text: few calibration sequences (`--samples`), so that losses are a little above those of a
recipe as it ships; gates that hold here hold there. What is scored is the finished checkpoint; of a recipe that
exports a graph too, the checkpoint alone. All three models come from files of 4 to 8 bits: losses compare recipes on
one model, not with the model as it was trained.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compile_fit import peaks, spec, spent
from harness.compiles import compiled
from harness.process import THREADS
from harness.record import layout, parsing, record, show, verdicts

from quantkit.model.source.open import open_model
from quantkit.planning.compiling import peaks as forecast
from quantkit.recipe import Recipe

MODELS = ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b"]
RECIPES = [
    *("awq-int4", "gptq-int4", "int4-best", "int8-weights", "int8-dynamic", "fp8", "nf4", "nvfp4", "mxfp4"),
    *("int4-symmetric", "int8", "int3", "rtn-int4", "int4-fast", "fp8-block", "int4-cpu", "gptq-int4+kv-fp8", "float"),
    *("int2", "int3-recovered", "int2-recovered"),
    *("gguf-q8_0", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q4_0", "gguf-iq4_nl", "gguf-q3_k_m"),
    *("gguf-iq4_xs", "gguf-iq3_s", "gguf-iq3_xxs", "gguf-iq2_m"),
]
# recipes that look at no calibration data
FREE = ("float", "rtn-int4", "int4-fast", "int8-weights", "fp8-block")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "models-measured.md"
PEAK = 0.06
_SAMPLES = "calibration.samples="


def measured(place: Path, model: str, recipe: str, samples: int, scored: int) -> dict[str, Any] | None:
    """One compile; None where it was refused, with the reason printed."""
    source, stated = open_model(model, hashed=False), Recipe.load(recipe)
    changes = [f"{_SAMPLES}{samples}"] if samples and recipe not in FREE else []
    kept = [{step.name: dict(step.options)} for step in stated.export if step.name == "checkpoint"]
    if kept and len(stated.export) > 1:
        changes.append(f"export={json.dumps(kept)}")
    row = compiled(place, f"{Path(model).name}-{recipe}", model, recipe, changes, scored, False)
    return row and {**row, "model": Path(model).name, "config": source.config, "was": source.was}


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table: losses with their intervals, gates, and the peak that was forecast beside the one seen."""
    rows = {each["name"]: each for each in row["figures"]}
    kl, perplexity = rows.get("accuracy.kl"), rows.get("accuracy.perplexity")
    expected, seen = forecast(spec(row)), peaks(row)
    part = max(seen, key=lambda name: seen[name])
    most = max(expected.values())
    found = (
        {"model": row["model"], "recipe": row["recipe"]}
        | {
            "samples": next(
                (int(each.rpartition("=")[2]) for each in row["changes"] if each.startswith(_SAMPLES)), None
            )
        }
        | {"scored": row["scored"], "bits": (rows.get("size.bits_per_weight") or {}).get("value")}
        | {"kl": kl and kl["value"], "kl_ci95": kl and kl["ci95"]}
        | {"top1": (rows.get("accuracy.top1_agreement") or {}).get("value")}
        | {"perplexity": perplexity and perplexity["value"]}
        | {"float_perplexity": perplexity and perplexity["baseline"] and perplexity["baseline"]["value"]}
        | {"gates": row["gates"], "cpu_seconds": sum(spent(row).values()), "peak_forecast": most}
        | {"peak": seen[part], "peak_at": part, "peak_error": most / seen[part] - 1}
        | {"parts": {name: [expected.get(name), seen[name]] for name in seen}}
    )
    both = found["perplexity"] and found["float_perplexity"]
    return {**found, "perplexity_ratio": found["perplexity"] / found["float_perplexity"] if both else None}


COLUMNS = layout(
    "model | recipe | bits=bits/weight:.2f | kl=KL:.4f | perplexity_ratio=perplexity ratio:.3f | top1=top-1:.3f | "
    "held=gates | cpu_seconds=CPU s:.0f | forecast_mb=peak MB forecast:.0f | peak_mb=real:.0f | "
    "peak_error=error:+.1% | peak_at=at"
)


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="aliases, or folders")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--samples", type=int, default=8, help="calibration sequences; 0: the recipes' own")
    parser.add_argument("--scored", type=int, default=3000, help="positions")
    parser.add_argument("--rows", type=Path, help="file of what was compiled so far")
    parser.add_argument("--table", action="store_true", help="no compile: the record and the page from the rows")
    options = parser.parse_args()

    known = json.loads(options.rows.read_text()) if options.rows and options.rows.is_file() else []
    done = {(row["model"], row["recipe"]) for row in known}
    asked = [] if options.table else [(model, recipe) for model in options.models for recipe in options.recipes]
    with tempfile.TemporaryDirectory(prefix="models-") as place:
        for model, recipe in asked:
            if (Path(model).name, recipe) in done:
                continue
            row = measured(Path(place), model, recipe, options.samples, options.scored)
            if row is not None:
                known.append(row)
                show("", [_shown(figures(row))], COLUMNS)
                if options.rows:
                    options.rows.write_text(json.dumps(known))
    found = [figures(row) for row in known]
    show(f"{THREADS} threads", [_shown(row) for row in found], COLUMNS)
    settings = {"threads": THREADS, "samples": options.samples, "scored": options.scored, "set": "prose-en"}
    claim = f"expected losses of each recipe on three models; gates hold on all, peak memory within {PEAK:.0%}"
    if options.table:
        PAGE.write_text(page(found), encoding="utf-8")
    compiles = [{**line, "compile": row} for line, row in zip(found, known, strict=True)]
    record("models", claim, compiles, settings)
    return verdicts(held(found))


def held(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """The claims."""
    failed = [f"{row['model']} {row['recipe']}" for row in rows if not all(row["gates"].values())]
    worst = max(rows, key=lambda row: abs(row["peak_error"]))
    return {
        f"gates hold{': not of ' + ', '.join(failed) if failed else ' on all'}": not failed,
        f"peak memory: at most {worst['peak_error']:+.1%} off ({worst['model']}, {worst['recipe']})": abs(
            worst["peak_error"]
        )
        <= PEAK,
    }


def _taken(model: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """How many sequences calibrated a model, and how many positions scored it."""
    mine = [row for row in rows if row["model"] == model]
    samples, scored = ({row[key] for row in mine if row[key]} for key in ("samples", "scored"))
    each = [f"{' or '.join(map(str, sorted(samples)))} sequences calibrate"] if samples else []
    each += [f"{' or '.join(map(str, sorted(scored)))} positions score"] if scored else []
    return f"- {model}: {', '.join(each) or 'not run yet'}"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """docs/models-measured.md."""
    by = {(row["model"], row["recipe"]): row for row in rows}
    lines = [_HEAD.format(taken="\n".join(_taken(model, rows) for model in MODELS))]
    columns = [f"{model}: KL | perplexity ×" for model in MODELS]
    lines += [f"| recipe | bits | {' | '.join(columns)} | gate: KL at most |", "|---" * (3 + 2 * len(MODELS)) + "|"]
    missing: list[str] = []
    for recipe in RECIPES:
        found = [by.get((model, recipe)) for model in MODELS]
        first = next((row for row in found if row is not None and row["kl"] is not None), None)
        if first is None:
            missing.append(f"`{recipe}`")
            continue
        cells = [f"`{recipe}`", f"{first['bits']:.2f}" if first["bits"] else ""]
        for row in found:
            if row is None:
                cells += ["not run", ""]
                continue
            width = (row["kl_ci95"][1] - row["kl_ci95"][0]) / 2
            failed = any(not ok for ok in row["gates"].values())
            cells += [
                f"{row['kl']:.3f} ± {width:.3f}{' **fails**' if failed else ''}",
                f"{row['perplexity_ratio']:.3f}",
            ]
        limit = Recipe.load(recipe).gates.kl_max
        lines.append(f"| {' | '.join([*cells, 'none' if limit is None else f'{limit:g}'])} |")
    lines += ["", f"No figure of any of them yet: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


_HEAD = """# Three language models, measured

Losses of each recipe on three models of different families, and its gate. `python benchmarks/models.py` makes this page
and its record in `benchmarks/results/`. `make models` fetches the two models that do not come with `make venv`. The
memory of compiles, forecast and real, stands in [scale.md](scale.md#memory-and-time-of-real-sizes).

- `smollm2-135m` (Apache-2.0): a Llama, grouped heads, one matrix for embedding and head. From GGUF Q4_1. Groups of 128
  do not divide its 576 channels: `fp8-block` is refused.
- `gemma-3-270m` (Gemma terms of use: for tests and records, not shipped): norms times 1 + w, norms of queries and keys,
  sliding windows, 262,144 tokens, BOS in front of every prompt. From GGUF Q4_K_M.
- `qwen2.5-coder-0.5b` (Apache-2.0): biases of queries, keys and values, 151,936 tokens, linears of 4,864 inputs. From
  GGUF Q4_K_M, which holds embedding and head apart.

All three were quantized before, to 4 to 8 bits. Losses are against that, and compare recipes on one model. `python
benchmarks/gguf_models.py` checks that the two conversions compute what llama.cpp computes on the same files.

## Expected losses

KL from the original in nats a token, ± half the 95 % interval, and perplexity over the original's
([glossary](glossary.md)). Calibration: sequences of 512 tokens of the shipped prose. Scores: text of its kind that
calibrated nothing. Sequences begin as prompts do, with BOS if the tokenizer adds one. They are few, so intervals are
wide:

{taken}
"""


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    failed = [name.rpartition(".")[2] for name, ok in row["gates"].items() if not ok]
    held = f"failed: {', '.join(failed)}" if failed else "hold" if row["gates"] else "none"
    return {**row, "held": held, "forecast_mb": row["peak_forecast"] / 1e6, "peak_mb": row["peak"] / 1e6}


if __name__ == "__main__":
    raise SystemExit(main())
