"""A small random model compiled by recipes on the GPU and on the processor: the same errors, the same scores.

Both compiles read the same files. Layer by layer the `error` of the manifests is compared, and the KL of both from the
float model; what a compile checks of itself has to hold in both. Then the commands that only a GPU can answer run on
what was compiled. The weights are random, of a Llama's build: what is compared is two computations, no quality.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parts.compile_model import ROOT, compiled

_SIZES = {"layers": 4, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4}
# name -> words of the command
RECIPES: Mapping[str, tuple[str, ...]] = (
    {"gptq-int4": ("gptq-int4",), "awq-int4": ("awq-int4",), "int4-best": ("int4-best",)}
    | {"hqq": ("rtn-int4", "--set", "passes=[hqq]"), "int8": ("int8",)}
    | {"gptq-int4+kv-fp8": ("gptq-int4+kv-fp8",), "nf4": ("nf4",), "int8-dynamic": ("int8-dynamic",)}
    | {"fp8": ("fp8",), "fp8-block": ("fp8-block",), "nvfp4": ("nvfp4",)}
)
# at most: a layer's error, relative to the processor's; nats of KL between both
LAYERS, NATS = 0.01, 0.002
# line of PENDING.md -> recipes of it, and which of the two it is about
LINES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "block-agrees": (("gptq-int4",), "layers"),
    "passes-agree": (("awq-int4", "int4-best", "hqq"), "layers"),
} | {"folds-shared": (("awq-int4",), "kl"), "scales-agree": (("int8", "gptq-int4+kv-fp8"), "kl")}
# what is asked of bundles that the GPU has compiled: (name, recipe, words)
_ASKED = (
    ("measure", "int4-best", ("--runtime", "torch", "--batch", "1,16", "--seconds", "15")),
    ("measure", "nf4", ("--runtime", "torch", "--batch", "1,16", "--seconds", "15")),
    ("tax", "gptq-int4", ("--device", "cuda", "--batch", "1,16", "--seconds", "15")),
)
_PARALLEL, _SAMPLES = 8, 16
# of a row of measurements
_KEPT = ("name", "batch", "value", "ci95", "runtime", "settings", "shape", "op", "baseline")
Row = dict[str, Any]


def measured(job: dict[str, Any], deadline: float) -> Iterator[tuple[str, Any]]:
    """(section, entry): `recipes`, one a recipe; `commands`, one a command; `settles`.

    Args:
        job: `target` of the compiles; `work`: a folder with room.
        deadline: `time.monotonic()` after which nothing new begins.
    """
    sys.path.append(str(ROOT / "benchmarks"))
    from harness import random_model

    with tempfile.TemporaryDirectory(dir=job["work"]) as name, ThreadPoolExecutor(_PARALLEL) as pool:
        folder = Path(name)
        random_model.make(folder / "model", dtype="bfloat16", **_SIZES)

        def made(recipe: str, at: str) -> Row:
            if time.monotonic() > deadline:
                return {"reason": "the time was up", "layers": {}}
            out = folder / f"{recipe}-{at}"
            asked = [sys.executable, "-m", "quantkit", "compile", str(folder / "model"), "--recipe", *RECIPES[recipe]]
            asked += ["--device", at, "--target", job["target"], "--out", str(out), "--json", "--no-speed"]
            asked += ["--set", f"calibration.samples={_SAMPLES}"]
            return compiled(asked, deadline) | described(out)

        # most of a compile of this size is loading libraries: several at a time, of which nothing is timed
        both: dict[str, list[Future[Row]]] = {
            recipe: [pool.submit(made, recipe, at) for at in ("cuda", "cpu")] for recipe in RECIPES
        }
        found = {}
        for recipe, (ours, theirs) in both.items():
            found[recipe] = compared(recipe, ours.result(), theirs.result())
            yield "recipes", found[recipe]
        for line, (names, about) in LINES.items():
            asked_of = [found[each] for each in names]
            if all(row.get(about) is not None for row in asked_of):
                limit = LAYERS if about == "layers" else NATS
                said = ", ".join(f"{row['recipe']} {row[about]:.2g}" for row in asked_of)
                holds = all(row["ok"] and row[about] <= limit for row in asked_of)
                yield "settles", {"line": line, "holds": holds, "by": f"{about}, at most {limit}: {said}"}
        for command, recipe, words in _ASKED:
            if time.monotonic() < deadline:
                told = ["--baseline", str(folder / "model")] if command == "measure" else []
                yield "commands", answered([command, str(folder / f"{recipe}-cuda"), *words, *told], deadline)


def described(out: Path) -> Row:
    """Errors of the layers in a bundle's manifest, if there is one."""
    try:
        manifest = json.loads((out / "manifest.json").read_text())
    except OSError:
        return {"layers": {}}
    return {"layers": {layer["name"]: layer["error"] for layer in manifest["layers"] if layer.get("error") is not None}}


def compared(recipe: str, ours: Row, theirs: Row) -> Row:
    """Both compiles of a recipe: what came out of each, and how far they are apart.

    Args:
        recipe: its name in `RECIPES`.
        ours, theirs: of `compile_model.compiled` and `described`, on the card and on the processor.

    Returns:
        `cuda`, `cpu`; `layers`: the largest difference of a layer's error, relative, and `where`; `kl`: nats between
        both scores; None of what was not found. `ok`: both ended well, and all of their checks hold.
    """
    row: Row = {"recipe": recipe, "kl": None, "layers": None}
    for at, found in (("cuda", ours), ("cpu", theirs)):
        row[at] = summary(found)
    row["ok"] = all(row[at]["exit"] == 0 and not row[at]["failed"] for at in ("cuda", "cpu"))
    if ours["layers"] and ours["layers"].keys() == theirs["layers"].keys():
        off = {name: abs(ours["layers"][name] / (error or 1.0) - 1.0) for name, error in theirs["layers"].items()}
        row["where"], row["layers"] = max(off.items(), key=lambda pair: pair[1])
    if row["cuda"]["kl"] is not None and row["cpu"]["kl"] is not None:
        row["kl"] = abs(row["cuda"]["kl"] - row["cpu"]["kl"])
    row["same_content"] = ours.get("content_sha256") == theirs.get("content_sha256")
    return row


def summary(found: Row) -> Row:
    """Of `compile_model.compiled`, what holds of a compile beside others: neither times nor peaks are its own."""
    row = {name: found.get(name) for name in ("exit", "error", "reason", "kl", "content_sha256")}
    return row | {"failed": [check for check in found.get("checks") or [] if not check["ok"]]}


def answered(words: list[str], deadline: float) -> Row:
    """What a command says, as far as it fits a record."""
    asked = [sys.executable, "-m", "quantkit", *words, "--json"]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            asked, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(deadline - begin + 15.0, 1.0)
        )
    except subprocess.TimeoutExpired:
        return {"command": words, "exit": None, "reason": "the time was up"}
    row: Row = {"command": words, "exit": done.returncode, "seconds": time.monotonic() - begin}
    try:
        envelope = json.loads(done.stdout)
    except ValueError:
        return row | {"reason": done.stderr[-600:]}
    result = envelope["result"] or {}
    rows = result.get("measurements") or result.get("rows") or []
    row["verdict"] = result.get("verdict")
    kept = [{name: each.get(name) for name in _KEPT} for each in rows]
    return row | {"error": envelope["error"], "warnings": envelope["warnings"], "rows": kept}
