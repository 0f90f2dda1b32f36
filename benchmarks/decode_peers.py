"""Decode at batch 1 against llama.cpp and onnxruntime-genai, speed and loss: the same model, prompt, threads, one run.

    python benchmarks/decode_peers.py --prepare                 make the peers' environment and files, and end
    python benchmarks/decode_peers.py                           compile int4-cpu and float, then compare
    python benchmarks/decode_peers.py --model gemma-3-270m      another alias, or a GGUF file
    python benchmarks/decode_peers.py BUNDLE --float BUNDLE     bundles that are there
    python benchmarks/decode_peers.py BUNDLE --score            score what has no score yet, and end: no quiet is needed
    python benchmarks/decode_peers.py BUNDLE --also old=quantkit:BUNDLE --profile --out FILE

Each side keeps its model loaded in a process of its own (`harness/decode_side.py`) and decodes when it is its turn
(`harness/turns.py`). A step is the model, its logits and the choice of the likeliest token. Ratios are taken round by
round; printed are their median and its bootstrap interval over the rounds. The A/A ratio is the first against the
second turns of quantkit's own side.

The KL is that from the model's own forward in transformers, in float32, to the logits that a side gives where it is
timed (llama.cpp; onnxruntime-genai's generator; ONNX Runtime at the accuracy level that the graph asks for), on the
same positions of the shipped prose that calibrated nothing. Intervals are of Student's t over sequences; differences to
quantkit's are paired by sequence. A graph of ours that multiplies prompts in a way of its own is scored a few tokens at
a time, as it multiplies in a step, and its prompts beside that.

quantkit's side is its file in `quantkit_cpu`, with its own products and attention, where these run; the same file in
ONNX Runtime as it comes stands beside it.

The peers: llama.cpp's Q4_0, by its own quantize function with its defaults (the tied embedding and head become Q8_0),
and onnxruntime-genai's model builder at int4 with its defaults (block 32, symmetric, accuracy level 4, head and
embedding too), driven by its own generator. Neither calibrates. Both start from the same float weights as quantkit.
What they need is made in `.peers/` by the first run (`harness/decode_prepared.py`); llama.cpp compiles for minutes, for
the instruction set of this machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.decode_prepared import PeerFiles, graph, prepare, scores
from harness.process import THREADS, compiled, helper
from harness.record import command, layout, parsing, record, show, verdicts
from harness.turns import QUIET, WARM, Side, play, turn
from numpy.typing import NDArray
from scipy import stats

from quantkit import machine
from quantkit.model.source.open import open_model
from quantkit.pipeline.baseline import float_export
from quantkit.runtimes import load_runtime

MODEL = "smollm2-135m"
Array = NDArray[Any]
KINDS = "KIND: quantkit, quantkit_cpu, onnxruntime, genai or llama.cpp, see harness/decode_side.py"
OURS, PLAIN, FLOAT = "quantkit", "quantkit in onnxruntime", "quantkit float"
LLAMA, GENAI = "llama.cpp Q4_0", "genai int4"
PROMPT, SCORED = 128, 512
# a step of ours is to take at most this share of a peer's
SHARES = {LLAMA: 0.75, GENAI: 0.85}


def middle(values: Array) -> tuple[float, tuple[float, float]]:
    """The median over rounds, and its bootstrap interval; a round that something else disturbed moves neither much."""
    found = stats.bootstrap((values,), np.median, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return float(np.median(values)), (float(low), float(high))


def mean(values: Array) -> tuple[float, tuple[float, float]]:
    """The mean over sequences and its interval, by Student's t."""
    half = float(stats.sem(values) * stats.t.ppf(0.975, values.size - 1))
    return float(values.mean()), (float(values.mean()) - half, float(values.mean()) + half)


def losses(scored: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each side its KL, and how much more that is than quantkit's, with intervals over sequences."""
    found: dict[str, dict[str, Any]] = {}
    own = np.array(scored[OURS]["kl"])
    for name, score in scored.items():
        kl = np.array(score["kl"])
        value, interval = mean(kl)
        more, more_interval = mean(kl - own)
        found[name] = (
            {"kl": value, "kl_ci95": interval, "kl_more": more, "kl_more_ci95": more_interval}
            | {"kl_sequences": kl.tolist(), "top1": float(np.mean(score["top1"]))}
            | {"perplexity": float(np.exp(np.mean(score["nll"])))}
            | {"perplexity_reference": float(np.exp(np.mean(score["nll_reference"])))}
        )
        if "prompt" in score:
            found[name]["kl_prompt"], found[name]["kl_prompt_ci95"] = mean(np.array(score["prompt"]["kl"]))
    return found


def summary(turns: dict[str, list[dict[str, Any]]], lost: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a side. `ratio` is its step over quantkit's, above 1 where quantkit is faster."""
    by_turn = {name: np.array([np.median(turn["seconds"]) for turn in those]) for name, those in turns.items()}
    by_round = {name: values.reshape(-1, 2).mean(axis=1) for name, values in by_turn.items()}
    rows = []
    for name, those in turns.items():
        seconds = np.concatenate([turn["seconds"] for turn in those])
        low, median, high = (float(value) for value in np.quantile(seconds, [0.1, 0.5, 0.9]))
        ratios = by_round[name] / by_round[OURS]
        ratio, interval = middle(ratios)
        rows.append(
            {"side": name, "step": median, "p10": low, "p90": high, "tokens_per_second": 1 / median}
            | {"n": seconds.size, "ratio": ratio, "ratio_ci95": interval, "ratio_rounds": ratios.tolist()}
            | {"others": max(one["others"] for one in those), "tokens": those[0]["tokens"][:16], **lost[name]}
        )
    pairs = by_turn[OURS].reshape(-1, 2)
    rows[0]["aa_ratio"], rows[0]["aa_ci95"] = middle(pairs[:, 0] / pairs[:, 1])
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("bundle", nargs="?", type=Path, help="of the model, with onnx/; default: compile int4-cpu")
    parser.add_argument("--model", default=MODEL, help="an alias, or a GGUF file")
    parser.add_argument("--float", type=Path, dest="high", help="the float bundle; default: made, if BUNDLE is")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=KIND:PATH", help=f"a further side; {KINDS}"
    )
    parser.add_argument("--llama", type=Path, help="a GGUF; default: made")
    parser.add_argument("--genai", type=Path, help="a folder of onnxruntime-genai's builder; default: made")
    parser.add_argument("--sequences", type=int, default=12, help=f"of {SCORED} tokens, that are scored")
    parser.add_argument("--eval", type=Path, help="a JSON list of token ids to score instead")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=64, help="timed steps a turn; a round has two turns a side")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait in all for a machine that is quiet"
    )
    parser.add_argument("--profile", action="store_true", help="seconds a step by type of operator, of the ONNX sides")
    parser.add_argument("--out", type=Path, help="a JSON file with every step's seconds")
    parser.add_argument("--prepare", action="store_true", help="make the peers' environment and files, and end")
    parser.add_argument("--score", action="store_true", help="score what has no score yet, and end")
    options = parser.parse_args()
    made = prepare(options.model)
    if options.prepare:
        print(json.dumps(made.about, indent=1))
        return 0

    with tempfile.TemporaryDirectory() as name:
        ours, high = options.bundle, options.high
        if ours is None:
            ours = Path(name) / "int4"
            compiled(options.model, "int4-cpu", ours, "--no-speed")
            high = high or float_export(open_model(options.model), "onnx", {}).parent
        own = load_runtime("quantkit_cpu").why_not_here()
        if own:
            print(f"quantkit_cpu does not run here: {own}; its side is the graph in onnxruntime")
        chosen = [(OURS, "quantkit", ours)] if own else [(OURS, "quantkit_cpu", ours), (PLAIN, "quantkit", ours)]
        chosen += [(LLAMA, "llama.cpp", options.llama or made.llama)]
        chosen += [(GENAI, "genai", options.genai or made.genai)]
        chosen += [(FLOAT, "quantkit", high)] if high else []
        for also in options.also:
            side, _, rest = also.partition("=")
            kind, _, path = rest.partition(":")
            chosen.append((side, kind, Path(path)))
        return compare(chosen, made, options, Path(name))


def token_ids(options: argparse.Namespace) -> tuple[list[int], list[list[int]]]:
    """The prompt, and the sequences to score."""
    asked = {"model": options.model, "set": "prose-en"}
    prompt = helper("ids.py", {**asked, "samples": 1, "tokens": PROMPT})[0]["ids"][0]
    if options.eval:
        return prompt, json.loads(options.eval.read_text())[: options.sequences]
    several = {**asked, "split": "eval", "samples": options.sequences, "tokens": SCORED}
    return prompt, helper("ids.py", several)[0]["ids"]


def compare(chosen: list[tuple[str, str, Path]], made: PeerFiles, options: argparse.Namespace, place: Path) -> int:
    """Score all sides, run them in turns, print and record; the exit status."""
    ids, sequences = token_ids(options)
    lost = losses(scores(options.model, chosen, sequences))
    if options.score:
        show_losses(lost, options)
        return 0
    sides = [Side(name, kind, path.resolve(), place / f"{name}.err") for name, kind, path in chosen]
    room = WARM + options.steps + 1
    about = {side.name: side.ask("load", prompt=ids, room=room) for side in sides}
    deadline = time.perf_counter() + options.patience
    turns = play(sides, options.rounds, options.steps, deadline)
    for side in sides:
        side.end()
    plain = [side for side in sides if side.kind not in ("llama.cpp", "quantkit_cpu")]
    graphs = list({side.path: side for side in reversed(plain)}.values())[::-1]
    profiles = {}
    for side in graphs if options.profile else []:
        # the plain runner for all: genai's generator gives no profile of single steps
        runner = Side(side.name, "onnxruntime", side.path, side.errors)
        runner.ask("load", prompt=ids, room=room)
        profiles[side.name] = turn(runner, deadline, "profile", steps=options.steps)
        runner.end()

    rows = summary(turns, lost)
    columns = layout(
        "side | milliseconds=step ms:.2f | low=p10:.2f | high=p90:.2f | tokens_per_second=tokens/s:.1f | "
        "ratio=step / quantkit's:.3f | interval=95 % | others=others, at most:.0%"
    )
    printed = [
        row
        | {"milliseconds": row["step"] * 1e3, "low": row["p10"] * 1e3, "high": row["p90"] * 1e3}
        | {"interval": "{:.3f} to {:.3f}".format(*row["ratio_ci95"]) if row["side"] != OURS else ""}
        for row in rows
    ]
    where = f"{THREADS} threads, {machine.cpu_name()}, {machine.isa()}"
    show(f"{options.model}, decode at batch 1, context {PROMPT} on, {where}", printed, columns)
    print("A/A ratio of quantkit's side: {:.3f} ({:.3f} to {:.3f})".format(rows[0]["aa_ratio"], *rows[0]["aa_ci95"]))
    show_losses(lost, options)
    disturbed = sum(one["others"] >= QUIET for those in turns.values() for one in those)
    if disturbed:
        count = sum(map(len, turns.values()))
        print(f"NOT QUIET: other processes ran during {disturbed} of {count} turns; the figures say little")
    for name, found in profiles.items():
        spent = sum(found["operators"].values())
        print(f"{name}: operators {spent * 1e3:.2f} ms; step {found['step'] * 1e3:.2f} ms under the profiler")
        lines = [
            {"type": kind, "count": found["counts"][kind], "milliseconds": seconds * 1e3, "share": seconds / spent}
            for kind, seconds in found["operators"].items()
        ]
        show(
            name, lines[:8], {"type": "operator", "count": "a step:.0f", "milliseconds": "ms:.3f", "share": "share:.1%"}
        )
    settings = {
        "model": options.model,
        "threads": THREADS,
        "prompt_tokens": PROMPT,
        "steps": options.steps,
        "rounds": options.rounds,
        "scored": {
            "sequences": len(sequences),
            "tokens": len(sequences[0]),
            "text": "given" if options.eval else "prose-en, eval",
        },
        "sides": about,
        "files": dict(made.about),
        "graphs": {side.name: graph(side.path) for side in graphs},
        "profiles": profiles,
        "turns_disturbed": disturbed,
        "isa": machine.isa(),
    }
    claim = (
        "a step at batch 1 takes at most 0.75 of llama.cpp's Q4_0 and 0.85 of onnxruntime-genai's int4, at a lower KL"
    )
    if options.out:
        whole = {"claim": claim, "command": command(), "machine": machine.describe()} | {
            "settings": settings,
            "rows": rows,
        }
        options.out.write_text(json.dumps({**whole, "turns": turns}, indent=1, allow_nan=False) + "\n")
    record(
        f"decode-peers-{Path(options.model).stem if Path(options.model).suffix == '.gguf' else options.model}",
        claim,
        rows,
        settings,
    )
    by_name = {row["side"]: row for row in rows}
    checks = {}
    for name, share in SHARES.items():
        checks[f"a step takes at most {share} of that of {name}"] = by_name[name]["ratio"] >= 1 / share
        checks[f"a lower KL than {name}, beyond doubt"] = by_name[name]["kl_more_ci95"][0] > 0
    if FLOAT in by_name:
        checks["no slower than float32"] = by_name[FLOAT]["ratio"] >= 1
    return verdicts(checks)


def show_losses(lost: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print how far each side is from the model."""
    interval = "{:.4f} to {:.4f}"
    printed = [
        {"side": name, **row}
        | {"interval": interval.format(*row["kl_ci95"])}
        | {"more": interval.format(*row["kl_more_ci95"]) if name != OURS else ""}
        for name, row in lost.items()
    ]
    columns = {"side": "side", "kl": "KL:.4f", "interval": "95 %", "more": "more than quantkit's, 95 %"}
    columns |= {"kl_prompt": "KL of prompts:.4f", "top1": "top-1:.3f", "perplexity": "perplexity:.2f"}
    reference = next(iter(lost.values()))["perplexity_reference"]
    show(f"{options.model}, KL from float32 in transformers (perplexity {reference:.2f})", printed, columns)


if __name__ == "__main__":
    raise SystemExit(main())
