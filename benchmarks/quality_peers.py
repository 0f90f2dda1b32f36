"""quantkit against its peers, scheme by scheme: KL, bits and processor seconds, on the same token ids.

    python benchmarks/quality_peers.py                                           the shipped text, every scheme and peer
    python benchmarks/quality_peers.py --schemes int4-g64 --peers llm_compressor --methods gptq
    python benchmarks/quality_peers.py --model ./gemma-3-270m --calibration speeches.txt --eval held-out.txt bible.txt
    python benchmarks/quality_peers.py --calibration ids.jsonl --eval ids.json   token ids of your own

Each side runs in a fresh process and, the peers, in an environment of its own (`.peers/NAME/`, made by the first run:
`peers/README.md`). One scoring code serves all, ours included: the checkpoint as it was saved, loaded again in float32
by the library that the row names. All linears of the blocks are quantized, everything else is as in the source. A
record of each row is left in `results/peers/`; `peers/table.py` makes the tables of docs/comparisons.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import process
from harness.environments import environment
from harness.process import THREADS, compiled, helper
from harness.record import layout, parsing, record, sha256, show

ROOT = Path(__file__).resolve().parent.parent
SIDES = Path(__file__).resolve().parent / "peers"
TOKENS = 512
CLAIM = "KL of quantkit and of each peer at the same scheme, on the same token ids"
# at the same bits the checkpoint alone is compared: what else a recipe exports takes time and is not scored here
ALONE = "export=[{checkpoint: {layout: pack-quantized}}]"
GRADED, PLAIN, SWEPT = "gptq.gradients=4", "gptq.gradients=0", "gptq.sweeps=2"
RECIPES_OWN = "calibration.samples=32"
CLOSE = ("gptq.shrink=auto", "gptq.ridge=1", "gptq.sweeps=2")
# scheme -> recipes of ours, each with the changes that make it this scheme
OURS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "int4-g64": {"int4-best": ("int4-best", (ALONE,)), "int4-best, no gradients": ("int4-best", (ALONE, PLAIN))}
    | {"int4-best, gradients and sweeps": ("int4-best", (ALONE, GRADED, SWEPT))}
    | {"int4-best, closer": ("int4-best", (ALONE, *CLOSE))}
    | {"gptq-int4": ("gptq-int4", ()), "awq-int4": ("awq-int4", (ALONE,)), "int4-fast": ("int4-fast", ())},
    "int4-g64-symmetric": {"int4-symmetric": ("int4-symmetric", (ALONE,))},
    # of `--samples 104`, 96 train, of which the first 32 calibrate, and 8 are held out
    "int3-g64": {"int3": ("int3", (ALONE,)), "int3, no gradients": ("int3", (ALONE, PLAIN))}
    | {"int3, gradients and sweeps": ("int3", (ALONE, GRADED, SWEPT))}
    | {"int3, gradients, as much text": ("int3", (ALONE, GRADED))}
    | {"int3-recovered": ("int3-recovered", (ALONE, RECIPES_OWN))},
    "int2-g32": {"int2": ("int2", (ALONE,)), "int2, no gradients": ("int2", (ALONE, PLAIN))}
    | {"int2, gradients and sweeps": ("int2", (ALONE, GRADED, SWEPT))}
    | {"int2, gradients, as much text": ("int2", (ALONE, GRADED))}
    | {"int2-recovered": ("int2-recovered", (ALONE, RECIPES_OWN))},
    "int4-channel": {
        "int4-symmetric": ("int4-symmetric", (ALONE, "scheme.weights.granularity=channel", "scheme.weights.group=null"))
    },
    "nf4-b64": {"nf4": ("nf4", ())},
    "int8-w8a8": {"int8-dynamic": ("int8-dynamic", ())},
    "fp8-w8a8": {"fp8": ("fp8", ())},
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


def theirs(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """One run of a peer; a failure is a row too, with its last words."""
    try:
        answer, done = helper(SIDES / f"{peer}_side.py", request, python=environment(peer), threads=request["threads"])
    except (SystemExit, subprocess.CalledProcessError) as trouble:
        return {"failed": str(trouble).strip().splitlines()[-1][:300]}
    how = constant(peer, "HOW").get(request["method"], "")
    return {"peak_bytes": done.peak, **answer, "how": how}


def ours(recipe: str, changes: tuple[str, ...], model: str, request: dict[str, Any]) -> dict[str, Any]:
    """One compile, and the checkpoint through the peers' score."""
    data = [f"calibration.samples={request['samples']}", f"calibration.tokens={TOKENS}"]
    options = [*([] if recipe in DATA_FREE else data), *changes]
    out = Path(request["out"])
    arguments = [word for option in options for word in ("--set", option)]
    text = [] if recipe in DATA_FREE else ["--calibration", request["ids"]]
    threads = request["threads"]
    result, done = compiled(model, recipe, out, *text, *arguments, "--no-speed", env=process.environment(threads))
    answer, _ = helper(SIDES / "quantkit_side.py", {**request, "out": str(out / "model")}, threads=threads)
    return (
        {"peak_bytes": done.peak, **answer, "settings": {"recipe": recipe, "set": options}}
        | {"how": f"recipe `{recipe}`" + "".join(f", `{change}`" for change in changes if change != ALONE)}
        | {"calibrated": recipe not in DATA_FREE, "cpu_seconds": result["seconds"]["quantize_cpu"]}
        | {"cpu_seconds_quantize": result["seconds"]["quantize_cpu"]}
    )


def tokenized(model: str, texts: list[tuple[Path, int]]) -> tuple[str, list[Any]]:
    """The folder that a model opens to, and the ids of texts by its own tokenizer."""
    asked = {"model": model, "texts": [{"path": str(path), "samples": n} for path, n in texts], "tokens": TOKENS}
    found, _ = helper("windows.py", asked)
    return found["folder"], found["ids"]


def inputs(options: argparse.Namespace, place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The model as a folder with the ids of all splits as files, and the hash of each."""
    shipped = ROOT / "calibration" / "prose-en"
    calibration = options.calibration or shipped / "calib.txt"
    scoring = options.eval or [shipped / "eval.txt"]
    plain = [(path, n) for path, n in [(calibration, options.samples), *((path, options.scored) for path in scoring)]]
    folder, found = tokenized(options.model, [(path, n) for path, n in plain if path.suffix == ".txt"])
    ids = {path: rows for (path, _), rows in zip([p for p in plain if p[0].suffix == ".txt"], found, strict=True)}
    place.mkdir(parents=True, exist_ok=True)
    if calibration not in ids:
        lines = calibration.read_text().splitlines()[: options.samples]
        ids[calibration] = [json.loads(line)["input_ids"] for line in lines]
    target = place / "calibration.jsonl"
    target.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids[calibration]))
    hashes = {"calibration": f"{calibration.name} {sha256(target)}"}
    texts = {}
    for path in scoring:
        rows = ids[path] if path in ids else json.loads(path.read_text())
        texts[path.stem] = str(place / f"{path.stem}.json")
        Path(texts[path.stem]).write_text(json.dumps(rows))
        hashes[f"scored: {path.stem}"] = f"{path.name} {sha256(Path(texts[path.stem]))}"
    return {"model": folder, "ids": str(target), "texts": texts, "reference": str(place / "reference")}, hashes


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="an alias or a folder of a float model")
    parser.add_argument("--schemes", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--peers", nargs="*", choices=peers(), default=peers())
    parser.add_argument("--methods", nargs="*", help="only these of theirs: gptq, awq, rtn, ...")
    parser.add_argument("--ours", nargs="*", help="only these of ours: int4-best, ...")
    parser.add_argument("--calibration", type=Path, help="a .txt, or a .jsonl of input_ids; default: prose-en, calib")
    parser.add_argument("--eval", type=Path, nargs="+", help=".txt, or .json lists of ids; default: prose-en, eval")
    parser.add_argument("--samples", type=int, default=8, help=f"calibration sequences of {TOKENS} tokens")
    parser.add_argument("--scored", type=int, default=12, help=f"sequences of {TOKENS} tokens of each text to score on")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--work", type=Path, help="keep ids and the original's logits here; a later run reads them")
    parser.add_argument("--keep", type=Path, help="keep what the sides make, a folder a row, in this folder")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = options.work or Path(name)
        given, hashes = inputs(options, place)
        settings = {"model": Path(options.model).name, "threads": options.threads, "samples": options.samples}
        settings |= {"tokens": TOKENS, **hashes}

        def done(scheme: str, side: str, method: str, run: Any) -> None:
            label = re.sub(r"[^a-z0-9.]+", "-", f"{settings['model']} {scheme} {side} {method}".lower())
            with tempfile.TemporaryDirectory(dir=place) as name:
                out = options.keep / label if options.keep else Path(name) / "made"
                request = {**given, "samples": options.samples, "scheme": scheme, "threads": options.threads}
                row = run({**request, "method": method, "out": str(out)})
            row = {"scheme": scheme, "side": side.replace("_", "-"), "method": method, **row}
            rows.append(row)
            print(row, file=sys.stderr)
            record(f"peers/{label}", CLAIM, [row], settings)

        for scheme in options.schemes:
            for method, (recipe, changes) in OURS[scheme].items():
                if options.ours is None or method in options.ours:
                    done(scheme, "quantkit", method, lambda r, a=recipe, b=changes: ours(a, b, options.model, r))
            for peer in options.peers:
                for method in constant(peer, "SCHEMES").get(scheme, []):
                    if options.methods is None or method in options.methods:
                        done(scheme, peer, method, lambda r, a=peer: theirs(a, r))
    report(options.model, rows)
    return 0


def report(model: str, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    flat = [{**row, **next(iter(row.get("texts", {}).values()), {})} for row in rows]
    columns = layout(
        "scheme | side | method | kl=KL:.4f | kl_se=± se:.4f | perplexity:.2f | top1=top-1:.3f | "
        "bits_per_weight=bits:.2f | cpu_seconds=CPU s:.1f | reader=loaded by | failed"
    )
    show(f"{model}, tokens {TOKENS}", flat, columns)


if __name__ == "__main__":
    raise SystemExit(main())
