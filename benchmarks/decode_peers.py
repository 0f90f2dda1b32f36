"""Decode speed at batch 1 against llama.cpp and onnxruntime-genai: the same model, prompt and threads, in one run.

    python benchmarks/decode_peers.py --prepare                 make the peers' environment and files, and end
    python benchmarks/decode_peers.py                           compile int4-cpu and float, then compare
    python benchmarks/decode_peers.py BUNDLE --float BUNDLE     bundles that are there
    python benchmarks/decode_peers.py BUNDLE --also old=quantkit:BUNDLE --profile --out FILE

Each side keeps its model loaded in a process of its own (`harness/decode_side.py`) and decodes when it is its turn; the
others sleep. A round is A B C C B A, so that a drift of the machine hits all sides alike; every turn goes back to the
same prompt. A turn waits for a quiet machine and is taken again if other processes had more than a tenth of a processor
meanwhile. A step is the model, its logits and the choice of the likeliest token. Ratios are taken round by round;
printed are their median and its bootstrap interval over the rounds. The A/A ratio is the first against the second
turns of quantkit's own side.

The peers: llama.cpp's Q4_0, by its own quantize function with its defaults (the tied embedding and head become Q8_0),
and onnxruntime-genai's model builder at int4 with its defaults (block 32, symmetric, accuracy level 4, head and
embedding too), driven by its own generator. Both start from the same float weights as quantkit does. What they need is
made in `.peers/` by the first run; llama.cpp compiles for minutes, for the instruction set of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness.process import THREADS, compiled, helper, run
from harness.record import command, record, show, verdicts
from numpy.typing import NDArray
from scipy import stats

from quantkit import machine
from quantkit.model.source.alias import ALIASES

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".peers" / "decode"
PYTHON = VENV / "bin" / "python"
FILES = ROOT / ".peers" / "decode-files"
MODEL = "smollm2-135m"
LLAMA, GENAI = FILES / f"{MODEL}-q4_0.gguf", FILES / f"{MODEL}-genai-int4"
WHEELS = ["onnxruntime==1.31.1", "onnxruntime-genai==0.18.0", "gguf==0.19.0", "numpy"]
SOURCE = "llama-cpp-python==0.3.36"
BUILD = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"
SIDE = Path(__file__).parent / "harness" / "decode_side.py"
Array = NDArray[Any]
KINDS = "KIND: quantkit, onnxruntime, genai or llama.cpp, see harness/decode_side.py"
OURS, FLOAT = "quantkit", "quantkit float"
PROMPT, WARM = 128, 4
PAUSE, QUIET = 0.1, 0.1  # seconds between turns; what others may take of a processor during one


def prepare() -> dict[str, Any]:
    """The peers' environment and files, made where they are missing; what the files hold."""
    FILES.mkdir(parents=True, exist_ok=True)
    ready = [PYTHON, "-c", "import llama_cpp, onnxruntime_genai"]
    if not PYTHON.exists() or subprocess.run(ready, check=False, capture_output=True).returncode:
        print("making .peers/decode (llama.cpp compiles for minutes) ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        install = [PYTHON, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *WHEELS], check=True)
        source = [*install, "--no-binary", SOURCE.partition("==")[0], SOURCE]
        subprocess.run(source, check=True, env={**os.environ, "CMAKE_ARGS": BUILD})
    made = {"llama.cpp": FILES / "llama.json", "genai": FILES / "genai.json"}
    if not made["llama.cpp"].exists():
        f32 = FILES / f"{MODEL}-f32.gguf"
        request = {
            "source": str(ALIASES[MODEL].source.find(MODEL)),
            "f32": str(f32),
            "q4_0": str(LLAMA),
            "threads": THREADS,
        }
        answer, _ = helper("decode_files.py", request, python=PYTHON)
        made["llama.cpp"].write_text(json.dumps(answer))
    if not made["genai"].exists():
        if importlib.util.find_spec("onnxruntime_genai") is None:
            raise SystemExit(f"the model builder runs here: {sys.executable} -m pip install {WHEELS[1]}")
        folder = helper("ids.py", {"model": MODEL, "set": "prose-en", "samples": 1, "tokens": PROMPT})[0]["folder"]
        shutil.rmtree(GENAI, ignore_errors=True)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", str(GENAI)]
        with tempfile.TemporaryDirectory() as cache:
            done = run([*builder, "-p", "int4", "-e", "cpu", "-c", cache])
        if done.status:
            raise SystemExit(f"onnxruntime-genai's builder failed\n{done.err[-3000:]}")
        made["genai"].write_text(json.dumps(graph(GENAI)))
    return {name: json.loads(path.read_text()) for name, path in made.items()}


def graph(folder: Path) -> dict[str, Any]:
    """Of an ONNX decoder: its operators, and the settings of the quantized ones among them."""
    import onnx

    place = folder / "onnx" if (folder / "onnx").is_dir() else folder
    nodes = onnx.load(place / "model.onnx", load_external_data=False).graph.node
    settings: Counter[str] = Counter()
    for node in nodes:
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            given = {one.name: one.i for one in node.attribute if one.name in ("bits", "block_size", "accuracy_level")}
            settings[" ".join([node.op_type, *(f"{name}={value}" for name, value in sorted(given.items()))])] += 1
    return {
        "bytes": sum(path.stat().st_size for path in place.glob("model.onnx*")),
        "operators": dict(Counter(node.op_type for node in nodes).most_common()),
        "quantized": dict(settings),
    }


class Side:
    """A process of `decode_side.py` that answers one request at a time."""

    def __init__(self, name: str, kind: str, path: Path, errors: Path) -> None:
        self.name, self.kind, self.path, self.errors = name, kind, path, errors
        # each runtime waits as it does by default: OMP_WAIT_POLICY=PASSIVE would slow llama.cpp's barriers
        spared = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        env = {key: value for key, value in os.environ.items() if key not in spared} | {"OMP_NUM_THREADS": str(THREADS)}
        python = PYTHON if kind in ("genai", "llama.cpp") else sys.executable
        with errors.open("wb") as stream:
            self.process = subprocess.Popen(
                [str(part) for part in (python, SIDE, kind, path, THREADS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=env,
                text=True,
            )

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Its answer; if it died, what it said last, and the end of the run."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: {what} failed\n{self.errors.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Close its input, which ends it."""
        self.process.stdin.close()
        self.process.wait()


def busy() -> float:
    """Processor seconds that this machine has worked since it started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0) - getattr(times, "guest", 0))


def turn(side: Side, deadline: float, what: str, **details: Any) -> dict[str, Any]:
    """One turn, taken when nothing else works on the machine, and again if something did meanwhile.

    `others`: processor seconds a second that other processes took. From `deadline` on any turn is taken as it is.
    """
    while True:
        before = busy()
        time.sleep(PAUSE)
        late = time.perf_counter() > deadline
        if busy() - before > QUIET * PAUSE and not late:
            continue
        before, began = busy(), time.perf_counter()
        answer = side.ask(what, **details)
        answer["others"] = max(0.0, busy() - before - answer["cpu"]) / (time.perf_counter() - began)
        if answer["others"] < QUIET or late:
            return answer


def play(sides: list[Side], rounds: int, steps: int, deadline: float) -> dict[str, list[dict[str, Any]]]:
    """The turns of each side, two a round: A B C C B A."""
    turns: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for side in sides:
        side.ask("run", steps=steps, warm=WARM)
    for _ in range(rounds):
        for side in [*sides, *reversed(sides)]:
            turns[side.name].append(turn(side, deadline, "run", steps=steps, warm=WARM))
    return turns


def middle(values: Array) -> tuple[float, tuple[float, float]]:
    """The median over rounds, and its bootstrap interval; a round that something else disturbed moves neither much."""
    found = stats.bootstrap((values,), np.median, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return float(np.median(values)), (float(low), float(high))


def summary(turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
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
            {
                "side": name,
                "step": median,
                "p10": low,
                "p90": high,
                "tokens_per_second": 1 / median,
                "n": seconds.size,
                "ratio": ratio,
                "ratio_ci95": interval,
                "ratio_rounds": ratios.tolist(),
                "others": max(one["others"] for one in those),
                "tokens": those[0]["tokens"][:16],
            }
        )
    pairs = by_turn[OURS].reshape(-1, 2)
    rows[0]["aa_ratio"], rows[0]["aa_ci95"] = middle(pairs[:, 0] / pairs[:, 1])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help=f"of {MODEL}, with onnx/; default: compile int4-cpu")
    parser.add_argument("--float", type=Path, dest="high", help="the float bundle; default: compiled, if BUNDLE is too")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=KIND:PATH", help=f"a further side; {KINDS}"
    )
    parser.add_argument("--llama", type=Path, default=LLAMA, help="a GGUF")
    parser.add_argument("--genai", type=Path, default=GENAI, help="a folder of onnxruntime-genai's builder")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=64, help="timed steps a turn; a round has two turns a side")
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds to wait in all for a machine that is quiet"
    )
    parser.add_argument("--profile", action="store_true", help="seconds a step by type of operator, of the ONNX sides")
    parser.add_argument("--out", type=Path, help="a JSON file with every step's seconds")
    parser.add_argument("--prepare", action="store_true", help="make the peers' environment and files, and end")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    made = prepare()
    if options.prepare:
        print(json.dumps(made, indent=1))
        return 0

    with tempfile.TemporaryDirectory() as name:
        ours, high = options.bundle, options.high
        if ours is None:
            ours = Path(name) / "int4"
            compiled(MODEL, "int4-cpu", ours)
            if high is None:
                high = Path(name) / "float"
                compiled(MODEL, "float", high)
        chosen = [(OURS, "quantkit", ours), ("llama.cpp Q4_0", "llama.cpp", options.llama)]
        chosen += [("genai int4", "genai", options.genai)]
        chosen += [(FLOAT, "quantkit", high)] if high else []
        for also in options.also:
            side, _, rest = also.partition("=")
            kind, _, path = rest.partition(":")
            chosen.append((side, kind, Path(path)))
        return compare(chosen, made, options, Path(name))


def compare(chosen: list[tuple[str, str, Path]], made: dict[str, Any], options: argparse.Namespace, place: Path) -> int:
    """Run all sides in turns, print and record; the exit status."""
    ids = helper("ids.py", {"model": MODEL, "set": "prose-en", "samples": 1, "tokens": PROMPT})[0]["ids"][0]
    sides = [Side(name, kind, path.resolve(), place / f"{name}.err") for name, kind, path in chosen]
    room = WARM + options.steps + 1
    about = {side.name: side.ask("load", prompt=ids, room=room) for side in sides}
    deadline = time.perf_counter() + options.patience
    turns = play(sides, options.rounds, options.steps, deadline)
    for side in sides:
        side.end()
    graphs = list({side.path: side for side in reversed(sides) if side.kind != "llama.cpp"}.values())[::-1]
    profiles = {}
    for side in graphs if options.profile else []:
        # the plain runner for all: genai's generator gives no profile of single steps
        runner = Side(side.name, "onnxruntime", side.path, side.errors)
        runner.ask("load", prompt=ids, room=room)
        profiles[side.name] = turn(runner, deadline, "profile", steps=options.steps)
        runner.end()

    rows = summary(turns)
    columns = {
        "side": "side",
        "milliseconds": "step ms:.2f",
        "low": "p10:.2f",
        "high": "p90:.2f",
        "tokens_per_second": "tokens/s:.1f",
        "ratio": "step / quantkit's:.3f",
        "interval": "95 %",
        "others": "others, at most:.0%",
    }
    printed = [
        row
        | {"milliseconds": row["step"] * 1e3, "low": row["p10"] * 1e3, "high": row["p90"] * 1e3}
        | {"interval": "{:.3f} to {:.3f}".format(*row["ratio_ci95"]) if row["side"] != OURS else ""}
        for row in rows
    ]
    show(f"{MODEL}, decode at batch 1, context {PROMPT} on, {THREADS} threads, {machine.cpu_name()}", printed, columns)
    print("A/A ratio of quantkit's side: {:.3f} ({:.3f} to {:.3f})".format(rows[0]["aa_ratio"], *rows[0]["aa_ci95"]))
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
        "model": MODEL,
        "threads": THREADS,
        "prompt_tokens": PROMPT,
        "steps": options.steps,
        "rounds": options.rounds,
        "sides": about,
        "files": made,
        "graphs": {side.name: graph(side.path) for side in graphs},
        "profiles": profiles,
        "turns_disturbed": disturbed,
        "isa": machine.isa(),
    }
    claim = (
        "decode at batch 1 at least as fast as llama.cpp's Q4_0 and onnxruntime-genai's int4, twice as fast as float"
    )
    if options.out:
        whole = {
            "claim": claim,
            "command": command(),
            "machine": machine.describe(),
            "settings": settings,
            "rows": rows,
        }
        options.out.write_text(json.dumps({**whole, "turns": turns}, indent=1, allow_nan=False) + "\n")
    record("decode-peers", claim, rows, settings, write=not options.no_record)
    named = {row["side"]: row["ratio"] for row in rows}
    checks = {f"at least the speed of {name}": named[name] >= 1 for name in ("llama.cpp Q4_0", "genai int4")}
    if FLOAT in named:
        checks["twice the speed of float"] = named[FLOAT] >= 2
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
