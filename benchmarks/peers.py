"""quantkit against llm-compressor on the same token ids, on this machine, in one run.

    python benchmarks/peers.py                                                     the shipped text
    python benchmarks/peers.py --calibration ids.jsonl --eval ids.json --rounds 3     token ids of your own
    python benchmarks/peers.py --awq                                               its AWQ beside our awq-int4 as well

The sides take turns (A B A B ...), each in a fresh process at 2 threads, so that whatever else the machine does hits
both; the ratio is taken round by round and its spread is printed. Both stores are int4, group 64, asymmetric, all
linears of the blocks; both are loaded by plain transformers and scored by the same code. The peer's environment is made
in `.peers/` by the first run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, helper, scored
from harness.record import record, sha256, show

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".peers"
PYTHON = VENV / "bin" / "python"
PINNED = ["torch==2.13.0", "llmcompressor==0.14.0.1"]
SAMPLES, TOKENS = 8, 512


def environment() -> None:
    """The peer's own environment: its pins are not ours. torch first, so that it is the build for processors."""
    if PYTHON.exists():
        return
    print("making .peers ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", "torch"], check=True)
    subprocess.run([*install, *PINNED], check=True)


def inputs(model: str, place: Path) -> dict[str, Any]:
    """The model as a folder, and calibration ids of the shipped text as a file."""
    found, _ = helper("ids.py", {"model": model, "set": "prose-en", "samples": SAMPLES, "tokens": TOKENS})
    path = place / "calibration.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in found["ids"]))
    return {"folder": found["folder"], "ids": path}


def ours(recipe: str, model: str, ids: Path, out: Path) -> dict[str, Any]:
    change = ["--calibration", ids, "--set", f"calibration.samples={SAMPLES}", "--set", f"calibration.tokens={TOKENS}"]
    result, done = compiled(model, recipe, out, *change)
    return {
        "who": f"quantkit {recipe}",
        "cpu_seconds": result["seconds"]["quantize_cpu"],
        "peak_bytes": done.peak,
        "folder": str(out / "model"),
    }


def theirs(method: str, folder: str, ids: Path, out: Path) -> dict[str, Any]:
    request = {
        "model": folder,
        "ids": str(ids),
        "samples": SAMPLES,
        "method": method,
        "out": str(out),
        "group": 64,
        "symmetric": False,
        "threads": THREADS,
    }
    answer, done = helper("llm_compressor.py", request, python=PYTHON)
    return {"who": f"llm-compressor {method.upper()}", "peak_bytes": done.peak, "folder": str(out), **answer}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", type=Path, help=f"jsonl of input_ids, the first {SAMPLES} are used")
    parser.add_argument("--eval", type=Path, help="a JSON list of id lists; default: prose-en, eval")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--awq", action="store_true", help="AWQ as well (minutes a round)")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    environment()

    pairs = [("gptq-int4", "gptq"), *([("awq-int4", "awq")] if options.awq else [])]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        given = inputs(options.model, place)
        ids = options.calibration.resolve() if options.calibration else given["ids"]
        for number in range(options.rounds):
            for recipe, method in pairs:
                runs.append({"round": number, **ours(recipe, options.model, ids, place / f"{recipe}-{number}")})
                runs.append({"round": number, **theirs(method, given["folder"], ids, place / f"{method}-{number}")})
        text = {"ids": str(options.eval.resolve())} if options.eval else {"set": "prose-en"}
        folders = {str(index): run.pop("folder") for index, run in enumerate(runs)}
        scores = scored(options.model, folders, {"eval": text})
    rows = [{**run, **score} for run, score in zip(runs, scores, strict=True)]

    print(f"perplexity of the original: {rows[0]['perplexity_reference']:.3f} on {rows[0]['n']} positions")
    for row in rows:
        row["peak_megabytes"] = row["peak_bytes"] / 1e6
    columns = {
        "round": "round",
        "who": "who",
        "kl": "KL:.4f",
        "kl_se": "± se:.4f",
        "perplexity": "perplexity:.2f",
        "top1": "top-1:.3f",
        "cpu_seconds": "CPU s:.1f",
        "peak_megabytes": "peak MB:.0f",
    }
    show(f"{options.model}, int4 group 64 asymmetric, {THREADS} threads", rows, columns)
    settings: dict[str, Any] = {
        "model": options.model,
        "threads": THREADS,
        "calibration": sha256(options.calibration) if options.calibration else "prose-en, calib split",
        "samples": SAMPLES,
        "tokens": TOKENS,
        "eval": sha256(options.eval) if options.eval else "prose-en, eval split, 12 x 512",
    }
    for recipe, method in pairs:
        ratios = []
        for number in range(options.rounds):
            sides = {row["who"]: row["cpu_seconds"] for row in rows if row["round"] == number}
            ratios.append(sides[f"llm-compressor {method.upper()}"] / sides[f"quantkit {recipe}"])
        middle = statistics.median(ratios)
        settings[f"cpu_ratio_{method}"] = {"median": middle, "rounds": ratios}
        spread = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"processor seconds, llm-compressor {method.upper()} / {recipe}: {spread}")
    claim = "the same or lower KL than llm-compressor's method of the same name, in less processor time"
    record("peers-ids" if options.eval else "peers", claim, rows, settings, write=not options.no_record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
