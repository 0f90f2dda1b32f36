"""What the second way to multiply brings prompts and batches, and what it costs: `prefill: int8` of `int4-cpu`.

    python benchmarks/prompt_ways.py
    python benchmarks/prompt_ways.py --bundles DIR      compile and score into DIR, or take what is there
    python benchmarks/prompt_ways.py --eval ids.json    score on lists of token ids instead of the shipped text

Two other ways are beside it: ONNX Runtime's own single one, and quantkit's operators (`quantkit_cpu`), which read the
same codes for one row and for a thousand.

Three graphs of SmolLM2-135M: float32, `int4-cpu` as it is (one way to multiply), and with `onnx.prefill=int8` (two
ways). All are timed in turns in one process, in one run: prompts of 256 and 1,024 tokens, and steps of 1, 4 and 16
sequences; two ways besides with ONNX Runtime's flash attention switched off (`ORT_GQA_DISABLE_FLASH_ATTENTION=1`).
Ratios are to float32, above 1 where a side is faster. Memory is the peak of a process that runs one prompt, or one
step. The KL from plain transformers is taken twice: whole sequences at a time, as a prompt is, and 8 tokens at a time,
which go the way of a step.

Claims: with quantkit's operators prompts at least 2.0 times as fast as float32 and batch 16 at least 1.8 times (on
AVX-512 VNNI), nothing slower than float32 whichever way, and the KL of a step at most 0.075.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness.process import THREADS, compiled, helper
from harness.record import parsing, record, show, verdicts

from quantkit import machine
from quantkit.stats.abba import compare

MODEL = "smollm2-135m"
SHAPES = [("prefill", 1, 256), ("prefill", 1, 1024), ("decode", 16, 128), ("decode", 4, 128), ("decode", 1, 128)]
FLOAT, SAME, INT8, PLAIN = "float32", "one way", "two ways", ", no flash attention"
OWN = "quantkit_cpu"
MADE = {
    FLOAT: ("float", "float", ["--set", "export=[{onnx: {}}]"]),
    SAME: ("same", "int4-cpu", ["--set", "onnx.prefill=same"]),
    INT8: ("int8", "int4-cpu", ["--set", "onnx.prefill=int8"]),
}
# tokens at a time that a graph takes as a step
STEP = 8
PROMPTS, BATCH, KL = 2.0, 1.8, 0.075


def graphs(place: Path) -> dict[str, Path]:
    """The three graphs' folders, each compiled where it is missing."""
    found = {}
    for name, (folder, recipe, changes) in MADE.items():
        if not (place / folder).is_dir():
            compiled(MODEL, recipe, place / folder, "--no-speed", *changes)
        found[name] = place / folder / "onnx"
    return found


def speed(found: dict[str, Path], seconds: float) -> list[dict[str, Any]]:
    """A row a shape and side."""
    sides = {name: {"graph": str(path), "flash": True, "own": False} for name, path in found.items()}
    sides[f"{INT8}{PLAIN}"] = {"graph": str(found[INT8]), "flash": False, "own": False}
    sides[OWN] = {"graph": str(found[SAME]), "flash": True, "own": True}
    rows = []
    for shape in helper("prompt_side.py", {"do": "time", "sides": sides, "shapes": SHAPES, "seconds": seconds})[0]:
        baseline = np.array(shape["seconds"][FLOAT])
        for name, times in shape["seconds"].items():
            taken = np.array(times)
            row = {key: shape[key] for key in ("kind", "batch", "tokens")}
            row |= {"side": name, "ms": 1e3 * float(np.median(taken)), "n": taken.size}
            if name != FLOAT:
                result = compare(taken, baseline)
                row |= {"ratio": result.ratio, "ratio_ci95": list(result.ratio_ci95), "aa_spread": result.aa_spread}
            rows.append(row)
    return rows


def weight(found: dict[str, Path]) -> list[dict[str, Any]]:
    """A row a graph: bytes of its files, peak memory of a step and of prompts."""
    rows = []
    for name, path in {**found, OWN: found[SAME]}.items():
        peaks = {
            tokens: helper("prompt_side.py", {"do": "weigh", "graph": str(path), "own": name == OWN, "tokens": tokens})[
                0
            ]["peak"]
            for tokens in (0, 256, 1024)
        }
        size = sum(file.stat().st_size for file in path.glob("model.onnx*"))
        rows.append({"side": name, "bytes": size, **{f"peak_{tokens}": peak for tokens, peak in peaks.items()}})
    return rows


def accuracy(found: dict[str, Path], place: Path, given: Path | None) -> list[dict[str, Any]]:
    """A row a quantized graph and way; of the shipped text, unless a list of ids is given."""
    kept = place / f"scores-{given.stem if given else 'prose-en'}.json"
    if not kept.exists():
        text = helper("ids.py", {"model": MODEL, "set": "prose-en", "split": "eval", "samples": 12, "tokens": 512})[0]
        ids = json.loads(given.read_text()) if given else text["ids"]
        chosen = {name: [str(found[name]), False] for name in (SAME, INT8)} | {OWN: [str(found[SAME]), True]}
        request = {"do": "score", "model": text["folder"], "graphs": chosen, "ids": ids, "steps": [0, STEP]}
        kept.write_text(json.dumps(helper("prompt_side.py", request)[0]))
    rows: list[dict[str, Any]] = json.loads(kept.read_text())
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--bundles", type=Path, help="a folder to compile and score into")
    parser.add_argument("--eval", type=Path, help="a JSON list of id lists")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each shape, at least six turns")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        place = options.bundles or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = graphs(place.resolve())
        scores = accuracy(found, place, options.eval)
        times = speed(found, options.seconds)
        sizes = weight(found)
    return tell(times, sizes, scores, options)


def tell(
    times: list[dict[str, Any]], sizes: list[dict[str, Any]], scores: list[dict[str, Any]], options: argparse.Namespace
) -> int:
    """Print and record; the exit status."""
    for row in times:
        row["interval"] = "{:.2f} to {:.2f}".format(*row["ratio_ci95"]) if "ratio" in row else ""
    columns = {"kind": "kind", "batch": "batch:d", "tokens": "tokens:d", "side": "side", "ms": "ms:.1f"}
    columns |= {"ratio": "times float32:.2f", "interval": "95 %", "n": "n:d"}
    show(f"{MODEL}, {THREADS} threads, {machine.cpu_name()}, {machine.isa()}", times, columns)
    megabytes = [{key: value if key == "side" else value / 1e6 for key, value in row.items()} for row in sizes]
    columns = {"side": "side", "bytes": "file, MB:.0f", "peak_0": "peak of a step:.0f"}
    show("memory", megabytes, columns | {f"peak_{size}": f"of a prompt of {size}:.0f" for size in (256, 1024)})
    for row in scores:
        row["fed"] = f"{row['step']} tokens at a time" if row["step"] else "a prompt"
    show("accuracy", scores, {"side": "side", "fed": "as", "kl": "KL:.4f", "kl_se": "±:.4f", "top1": "top 1:.4f"})
    settings = {"threads": THREADS, "isa": machine.isa(), "seconds": options.seconds}
    settings["scored"] = options.eval.name if options.eval else "prose-en, eval, 12 x 512"
    claim = "quantkit_cpu: prompts at least 2.0 times float32, batch 16 at least 1.8, nothing slower"
    record("prompt-ways", claim, [*times, *sizes, *scores], settings)
    ours = [row for row in times if row["side"] == OWN]
    checks = {f"a prompt of {row['tokens']} at least {PROMPTS}": row["ratio"] >= PROMPTS for row in ours[:2]}
    checks |= {f"batch 16 at least {BATCH}": ours[2]["ratio"] >= BATCH}
    for side in (OWN, INT8, SAME):
        slowest = min(row["ratio"] for row in times if row["side"] == side)
        checks |= {f"{side} never slower than float32": slowest >= 1}
    steps = next(row["kl"] for row in scores if row["side"] == OWN and row["step"])
    return verdicts(checks | {f"KL of a step at most {KL}": steps <= KL})


if __name__ == "__main__":
    raise SystemExit(main())
