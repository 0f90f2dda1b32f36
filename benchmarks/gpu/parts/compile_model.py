"""A random model of 8B's shapes, whose weights are made on this machine, compiled on its GPU by the command, twice.

The second compile runs under a sampling profiler (py-spy), which tells the seconds of each function.

What a compile takes does not depend on what the weights are. Config, tokenizer and token ids come with
`make gpu-bundle`; without it they are made here.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carried import UNPACKED

from quantkit.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
# what has to be reached: seconds of the blocks' work, of 32 layers
SECONDS = 60.0
# " 64%  export  checkpoint  about 10 s left"
_PROGRESS = re.compile(r"\s*\d+%  ([^ ]+)  ")
# seconds for what a command that ended has said last
_LAST_WORDS = 5.0
# samples a second of the profiler, and functions of which the record tells
_RATE, _FUNCTIONS = 20, 60
RECIPE, TARGET = "gptq-int4", "h200"


def measured(job: dict[str, Any], deadline: float) -> Iterator[tuple[str, Any]]:
    """(section, entry): `model`, one entry a compile; `functions` of the second; `settles`.

    Args:
        job: `layers`; `target` of the compile; `bundle`: what `make gpu-bundle` made; `work`: a folder with room.
        deadline: `time.monotonic()` after which nothing new begins.

    Raises:
        InputError: `compile-failed`, with what the command said.
    """
    layers, text = int(job["layers"]), Path(job["bundle"]) / "ids.jsonl"
    with tempfile.TemporaryDirectory(dir=job["work"]) as name:
        folder = Path(name)
        begin = time.monotonic()
        made(folder / "model", layers, Path(job["bundle"]) / "model")
        yield "model", {"what": "weights", "layers": layers, "seconds": time.monotonic() - begin}
        found = []
        for run in range(2):
            if time.monotonic() > deadline:
                yield "model", {"what": f"compile {run + 1}", "reason": "the time was up"}
                return
            asked = command(folder / "model", folder / f"bundle-{run}", job["target"], text if text.is_file() else None)
            stacks = folder / "stacks.txt"
            under = profiler(stacks) if run else []
            answer = compiled([*under, *asked], deadline)
            yield "model", {"what": f"compile {run + 1}", "layers": layers, "profiled": bool(under), **answer}
            if stacks.is_file():
                yield from (("functions", row) for row in functions(stacks.read_text(errors="replace")))
            if answer["exit"] not in (0, 1):  # a gate may fail: weights are random
                said = answer.get("error") or {"value": answer.get("reason", "")}
                raise InputError("compile-failed", where=" ".join(asked[2:5]), value=said["value"])
            found.append(answer)
            shutil.rmtree(folder / f"bundle-{run}", ignore_errors=True)
            if layers == 32:  # at once: a second compile may be lost, and if it is faster its line holds
                best = min(each["seconds"] for each in found)
                said = f"{best:.1f} s, all of the command, the least of {run + 1}"
                yield "settles", {"line": "compile-8b", "holds": best <= SECONDS, "by": said}
    if len(found) == 2:
        same = found[0]["content_sha256"] == found[1]["content_sha256"]
        yield "settles", {"line": "compile-same", "holds": same, "by": "two compiles, each in a process of its own"}


def made(folder: Path, layers: int, described: Path) -> None:
    """A checkpoint of random weights in bfloat16, drawn on the GPU, a shard a layer.

    Args:
        folder: new.
        layers: how many.
        described: where config and tokenizer are; it need not exist.
    """
    sys.path.append(str(ROOT / "benchmarks"))
    import torch
    from harness import random_model

    if described.is_dir():
        shutil.copytree(described, folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers}))
    else:
        random_model.describe(folder, layers=layers, positions=2048, dtype="bfloat16", **SIZES)
    random_model.fill(folder, device="cuda")
    # all of the GPU is the compile's
    torch.cuda.empty_cache()


def command(model: Path, out: Path, target: str, text: Path | None) -> list[str]:
    """What a user types."""
    asked = ["compile", str(model), "--recipe", RECIPE, "--device", "cuda", "--target", target, "--out", str(out)]
    asked += ["--calibration", str(text)] if text else []
    return [sys.executable, "-m", "quantkit", *asked, "--json"]


def profiler(stacks: Path) -> list[str]:
    """Return the words that put py-spy before a command; none where it is not there."""
    carried = next(iter(UNPACKED.glob("site/py_spy-*.data/scripts/py-spy")), None)
    if carried is not None:
        carried.chmod(0o755)
    tool = shutil.which("py-spy") or carried
    words = [
        "record",
        "--subprocesses",
        "--nonblocking",
        "--rate",
        str(_RATE),
        "--format",
        "raw",
        "-o",
        str(stacks),
        "--",
    ]
    return [str(tool), *words] if tool is not None else []


def functions(stacks: str) -> Iterator[dict[str, Any]]:
    """Yield functions of collapsed stacks: seconds of all threads in each, callees included; the longest first.

    Args:
        stacks: a line a stack, `process;outer (file:line);inner (file:line) samples`.
    """
    samples = Counter[str]()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        if count.isdecimal():
            for name in {frame.rpartition(":")[0] + ")" for frame in frames.split(";") if " (" in frame}:
                samples[name] += int(count)
    yield from ({"function": name, "seconds": count / _RATE} for name, count in samples.most_common(_FUNCTIONS))


def compiled(command: list[str], deadline: float) -> dict[str, Any]:
    """Exit code, seconds, peaks and content hash of one compile; its error where it ended with one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin = time.monotonic()
    with _Peak() as peak, tempfile.TemporaryFile("w+") as answer:
        running = subprocess.Popen(command, env=environment, stdout=answer, stderr=subprocess.PIPE, text=True)
        said, late = _Said(running, begin), False
        try:
            running.wait(max(deadline - begin, 1.0))
        except subprocess.TimeoutExpired:
            late = True
            running.kill()
            running.wait()
        # what it has started may outlive it for a moment, and holds the pipe open
        said.join(_LAST_WORDS)
        answer.seek(0)
        stdout = answer.read()
    found: dict[str, Any] = {"exit": running.returncode, "seconds": time.monotonic() - begin, "reached": said.stages}
    if late:
        return found | {"exit": None, "reason": "the time was up", "last": said.last}
    found["gpu_peak_bytes"] = peak.bytes
    if peak.missing:
        found["gpu_peak_missing"] = peak.missing
    found["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    try:
        # the profiler may print a line of its own
        envelope, _ = json.JSONDecoder().raw_decode(stdout[stdout.index("{") :])
    except ValueError:
        return found | {"reason": f"no answer: {said.last[-300:]}"}
    result = envelope["result"] or {}
    for name in ("content_sha256", "seconds", "memory_peak_bytes", "stages", "checks"):
        if name in result:
            found[f"told_{name}" if name in found else name] = result[name]
    found["kl"] = next((row["value"] for row in result.get("measurements", ()) if row["name"] == "accuracy.kl"), None)
    return found | {"error": envelope["error"], "warnings": envelope["warnings"]}


class _Said(threading.Thread):
    """What a command says while it runs: when it reached each stage, and its last line."""

    def __init__(self, running: subprocess.Popen[str], begin: float) -> None:
        super().__init__(daemon=True)
        self.stages: dict[str, float] = {}
        self.last = ""
        self._running, self._begin = running, begin
        self.start()

    def run(self) -> None:
        """Until there is nothing more."""
        assert self._running.stderr is not None
        for line in self._running.stderr:
            self.last = line
            if found := _PROGRESS.match(line):
                self.stages.setdefault(found[1], round(time.monotonic() - self._begin, 2))


class _Peak:
    """The most that the GPU's memory held while something else ran, beyond what it held before, as the driver says."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.missing = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            before = most = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            while not self._over.wait(0.05):
                most = max(most, int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
            self.bytes = most - before
        except Exception as problem:
            # the figure is missing, with the reason, and nothing else
            self.missing = f"{type(problem).__name__}: {problem}"
