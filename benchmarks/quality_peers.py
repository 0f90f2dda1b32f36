"""quantkit against its peers, scheme by scheme: KL, processor seconds and memory, on the same token ids in one run.

    python benchmarks/quality_peers.py                                           the shipped text, every scheme and peer
    python benchmarks/quality_peers.py --schemes int4-g64 --peers llm_compressor --rounds 3
    python benchmarks/quality_peers.py --calibration ids.jsonl --eval ids.json   token ids of your own

Each side runs in a fresh process and, the peers, in an environment of its own (`.peers/NAME/`, made by the first run:
`peers/README.md`), at 2 threads; with several rounds the sides take turns. One scoring code serves all, ours included:
the model as plain transformers, with the side's own library, loads it again, in float32. All linears of the blocks are
quantized, everything else is as in the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, helper
from harness.record import record, sha256, show

ROOT = Path(__file__).resolve().parent.parent
SIDES = Path(__file__).resolve().parent / "peers"
TOKENS = 512
# scheme -> recipes of ours, each with the changes that make it this scheme
OURS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "int4-g64": [("gptq-int4", ()), ("awq-int4", ()), ("int4-best", ()), ("int4-fast", ())],
    "int4-g64-symmetric": [("int4-symmetric", ())],
    "int3-g64": [("int3", ())],
    "int4-channel": [("int4-symmetric", ("scheme.weights.granularity=channel", "scheme.weights.group=null"))],
    "nf4-b64": [("nf4", ())],
    "int8-w8a8": [("int8-dynamic", ())],
    "fp8-w8a8": [("fp8", ())],
}
# of ours, those that see no text, only their own random tokens
DATA_FREE = {"int4-fast"}


def constant(peer: str, name: str) -> Any:
    """A constant of a side's file, read without importing it: its imports live in its own environment."""
    tree = ast.parse((SIDES / f"{peer}_side.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise SystemExit(f"{peer}_side.py has no {name}")


def peers() -> list[str]:
    """The sides there are, but for our own."""
    found = sorted(path.stem.removesuffix("_side") for path in SIDES.glob("*_side.py"))
    return [name for name in found if name != "quantkit"]


def environment(peer: str) -> Path:
    """The peer's own interpreter: its pins are not ours. torch first, so that it is the build for processors."""
    python = ROOT / ".peers" / peer / "bin" / "python"
    if not python.exists():
        print(f"making .peers/{peer} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-c", ROOT / "constraints.txt", "torch"], check=True)
        subprocess.run([*install, *constant(peer, "PINNED"), "transformers"], check=True)
    return python


def theirs(peer: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """One run of a peer; a failure is a row too, with its last words."""
    who = f"{peer.replace('_', '-')} {method}"
    try:
        answer, done = helper(SIDES / f"{peer}_side.py", {**request, "method": method}, python=environment(peer))
    except (SystemExit, subprocess.CalledProcessError) as trouble:
        return {"who": who, "failed": str(trouble).strip().splitlines()[-1][:300]}
    return {"who": who, "peak_bytes": done.peak, **answer}


def ours(
    recipe: str, changes: tuple[str, ...], model: str, request: dict[str, Any], calibration: Path
) -> dict[str, Any]:
    """One compile, and the checkpoint through the peers' score."""
    options = list(changes)
    if recipe not in DATA_FREE:
        options += [f"calibration.samples={request['samples']}", f"calibration.tokens={TOKENS}"]
    out = Path(request["out"])
    arguments = [word for option in options for word in ("--set", option)]
    text = [] if recipe in DATA_FREE else ["--calibration", calibration]
    result, done = compiled(model, recipe, out, *text, *arguments, "--no-speed")
    answer, _ = helper(SIDES / "quantkit_side.py", {**request, "out": str(out / "model")})
    bits = [row["value"] for row in result["measurements"] if row["name"] == "size.bits_per_weight"]
    return {
        **answer,
        "who": f"quantkit {recipe}",
        "changes": list(changes),
        "cpu_seconds": result["seconds"]["quantize_cpu"],
        "cpu_seconds_quantize": result["seconds"]["quantize_cpu"],
        "peak_bytes": done.peak,
        "bits_per_weight": bits[0] if bits else None,
        "own_kl": next(row["value"] for row in result["measurements"] if row["name"] == "accuracy.kl"),
    }


def inputs(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The model as a folder, and the ids of both splits as files."""
    asked = {"model": options.model, "set": "prose-en", "samples": options.samples, "tokens": TOKENS}
    found, _ = helper("ids.py", {**asked, "split": "calib"})
    calibration, scoring = place / "calibration.jsonl", place / "eval.json"
    if options.calibration:
        lines = options.calibration.read_text().splitlines()[: options.samples]
        calibration.write_text("\n".join(lines) + "\n")
    else:
        calibration.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in found["ids"]))
    if options.eval:
        scoring.write_text(options.eval.read_text())
    else:
        held, _ = helper("ids.py", {**asked, "split": "eval", "samples": 12})
        scoring.write_text(json.dumps(held["ids"]))
    return {"model": found["folder"], "ids": str(calibration), "eval": str(scoring)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--schemes", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--peers", nargs="*", choices=peers(), default=peers())
    parser.add_argument("--methods", nargs="*", help="only these of theirs: gptq, awq, rtn, ...")
    parser.add_argument("--recipes", nargs="*", help="only these of ours")
    parser.add_argument("--calibration", type=Path, help="jsonl of input_ids, the first --samples are used")
    parser.add_argument("--eval", type=Path, help="a JSON list of id lists; default: prose-en, eval")
    parser.add_argument("--samples", type=int, default=8, help=f"calibration sequences of {TOKENS} tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--label", help="of the record")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        given = inputs(options, place)
        for number in range(options.rounds):
            for scheme in options.schemes:
                request = {**given, "samples": options.samples, "scheme": scheme, "threads": THREADS}
                done = {"scheme": scheme, "round": number}
                for recipe, changes in OURS[scheme]:
                    if options.recipes is None or recipe in options.recipes:
                        asked = {**request, "out": str(place / f"{len(rows)}")}
                        rows.append({**done, **ours(recipe, changes, options.model, asked, Path(given["ids"]))})
                        print(rows[-1], file=sys.stderr)
                for peer in options.peers:
                    for method in constant(peer, "SCHEMES").get(scheme, []):
                        if options.methods is not None and method not in options.methods:
                            continue
                        asked = {**request, "out": str(place / f"{len(rows)}")}
                        rows.append({**done, **theirs(peer, method, asked)})
                        print(rows[-1], file=sys.stderr)
    report(options, rows)
    return 0


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table and the ratios, and record both."""
    for row in rows:
        row["peak_megabytes"] = row["peak_bytes"] / 1e6 if "peak_bytes" in row else None
    columns = {
        "scheme": "scheme",
        "who": "who",
        "kl": "KL:.4f",
        "kl_se": "± se:.4f",
        "perplexity": "perplexity:.2f",
        "top1": "top-1:.3f",
        "bits_per_weight": "bits:.2f",
        "cpu_seconds": "CPU s:.1f",
        "peak_megabytes": "peak MB:.0f",
        "failed": "failed",
    }
    show(f"{options.model}, {options.samples} x {TOKENS} tokens, {THREADS} threads", rows, columns)
    settings: dict[str, Any] = {
        "model": options.model,
        "threads": THREADS,
        "calibration": sha256(options.calibration) if options.calibration else "prose-en, calib split",
        "samples": options.samples,
        "tokens": TOKENS,
        "eval": sha256(options.eval) if options.eval else "prose-en, eval split, 12 x 512",
        "ratios": {},
    }
    for scheme in options.schemes:
        mine = [row for row in rows if row["scheme"] == scheme and row["who"].startswith("quantkit")]
        others = [row for row in rows if row["scheme"] == scheme and row not in mine and "failed" not in row]
        if not mine or not others:
            continue
        best = min(others, key=lambda row: row["kl"])
        for recipe in dict.fromkeys(row["who"] for row in mine):
            seconds = [row["cpu_seconds"] for row in mine if row["who"] == recipe]
            against = [row["cpu_seconds"] for row in others if row["who"] == best["who"]]
            row = next(row for row in mine if row["who"] == recipe)
            found = {
                "best_peer": best["who"],
                "kl": row["kl"] / best["kl"],
                "cpu": statistics.median(seconds) / statistics.median(against),
            }
            settings["ratios"][f"{scheme}: {recipe}"] = found
            print(
                f"{scheme}: {recipe} has {found['kl']:.2f} of the KL of {best['who']}, in {found['cpu']:.2f} of its CPU"
            )
    claim = "a lower KL than every peer at the same bits"
    label = options.label or ("quality_peers-ids" if options.eval else "quality_peers")
    record(label, claim, rows, settings, write=not options.no_record)


if __name__ == "__main__":
    raise SystemExit(main())
