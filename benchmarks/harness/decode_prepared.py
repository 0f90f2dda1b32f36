"""What `decode_peers.py` needs of others: their environment, their files of a model, and how far those are from it.

    .peers/decode/             llama.cpp, compiled for the instruction set of this machine, and onnxruntime-genai
    .peers/decode-files/       a model's float GGUF and its Q4_0, the folder of onnxruntime-genai's builder
    .peers/decode-files/kl/    what was scored, under the hash of all that a score depends on

A score is the KL from the model's own forward in transformers, in float32, to the logits that a side gives in the
runtime in which it is timed, at every position of some sequences.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from harness.process import THREADS, helper
from harness.turns import Side, python_of
from quantkit.model.source.alias import ALIASES

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".peers" / "decode"
PYTHON = VENV / "bin" / "python"
FILES = ROOT / ".peers" / "decode-files"
WHEELS = ["onnxruntime==1.31.1", "onnxruntime-genai==0.18.0", "gguf==0.19.0", "numpy"]
SOURCE = "llama-cpp-python==0.3.36"
BUILD = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"
# tokens at a time where a graph has a way of its own for prompts: as few as it multiplies as it does in a step
PIECE = 8


@dataclass(frozen=True)
class PeerFiles:
    """Of one model.

    Args:
        about: peer -> what its files hold.
    """

    llama: Path
    genai: Path
    about: Mapping[str, Any]


def environment() -> None:
    """The peers' environment, made where it is missing."""
    ready = [PYTHON, "-c", "import llama_cpp, onnxruntime_genai"]
    if PYTHON.exists() and not subprocess.run(ready, check=False, capture_output=True).returncode:
        return
    print("making .peers/decode (llama.cpp compiles for minutes) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *WHEELS], check=True)
    source = [*install, "--no-binary", SOURCE.partition("==")[0], SOURCE]
    subprocess.run(source, check=True, env={**os.environ, "CMAKE_ARGS": BUILD})


def prepare(model: str) -> PeerFiles:
    """The peers' environment, and their files of a model (an alias, or a GGUF file), made where they are missing."""
    environment()
    FILES.mkdir(parents=True, exist_ok=True)
    gguf = ALIASES[model].source.find(model) if model in ALIASES else Path(model)
    if gguf.suffix != ".gguf":
        raise SystemExit(f"{model} is no GGUF file: llama.cpp and the others are to start from the same weights")
    name = gguf.stem if gguf == Path(model) else model
    llama, genai = FILES / f"{name}-q4_0.gguf", FILES / f"{name}-genai-int4"
    return PeerFiles(llama, genai, {"llama.cpp": _of_llama(gguf, name, llama), "genai": _of_genai(model, name, genai)})


def _of_llama(source: Path, name: str, made: Path) -> Any:
    known = FILES / f"{name}-llama.json"
    if not known.exists() or not made.exists():
        f32 = FILES / f"{name}-f32.gguf"
        request = {"source": str(source), "f32": str(f32), "q4_0": str(made), "threads": THREADS}
        answer, _ = helper("decode_files.py", request, python=PYTHON)
        f32.unlink()
        known.write_text(json.dumps(answer))
    return json.loads(known.read_text())


def _of_genai(model: str, name: str, made: Path) -> Any:
    known = FILES / f"{name}-genai.json"
    if not known.exists() or not made.exists():
        if importlib.util.find_spec("onnxruntime_genai") is None:
            raise SystemExit(f"the model builder runs here: {sys.executable} -m pip install {WHEELS[1]}")
        folder = helper("ids.py", {"model": model, "set": "prose-en", "samples": 1, "tokens": 8})[0]["folder"]
        shutil.rmtree(made, ignore_errors=True)
        with tempfile.TemporaryDirectory() as cache:
            helper("genai_files.py", {"folder": folder, "out": str(made), "cache": cache})
        known.write_text(json.dumps(graph(made)))
    return json.loads(known.read_text())


def graph(folder: Path) -> dict[str, Any]:
    """Of an ONNX decoder: its operators, and the settings of the quantized ones among them; branches count too."""
    import onnx

    place = folder / "onnx" if (folder / "onnx").is_dir() else folder
    nodes = list(_nodes(onnx.load(place / "model.onnx", load_external_data=False).graph))
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


def _nodes(of: Any) -> Iterator[Any]:
    for node in of.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


# --- how far from the model -------------------------------------------------------------------------------------------


def scores(
    model: str, sides: Sequence[tuple[str, str, Path]], ids: Sequence[Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """Of each side by its name, what `decode_side.py` found on each sequence; what was scored before is not run again.

    Args:
        model: the reference.
        sides: name, kind and path, as they are timed.
        ids: sequences.

    Returns:
        Name -> {"kl": [n], "top1": [n], "nll", "nll_reference"}, and where a graph multiplies prompts in a way of its
        own, "prompt": the same of whole sequences at once, while the others are of a few tokens at a time.
    """
    known = FILES / "kl"
    known.mkdir(parents=True, exist_ok=True)
    places = {name: known / f"{_key(kind, path, ids)}.json" for name, kind, path in sides}
    left = [side for side in sides if not places[side[0]].exists()]
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        if left:
            request = {"model": model, "set": "prose-en", "samples": 1, "tokens": 8}
            folder = helper("ids.py", request)[0]["folder"]
            reference = Side("transformers", "transformers", Path(folder), place / "err")
            for number, row in enumerate(ids):
                reference.ask("logits", ids=list(row), to=str(place / f"{number}.npy"))
            reference.end()
        for name, kind, path in left:
            side = Side(name, kind, path.resolve(), place / "err")
            two_ways = kind in ("quantkit", "quantkit_cpu", "onnxruntime") and "If" in graph(path)["operators"]
            found = _score(side, ids, place, PIECE if two_ways else 0)
            if two_ways:
                found["prompt"] = _score(side, ids, place, 0)
            side.end()
            places[name].write_text(json.dumps(found))
    return {name: json.loads(path.read_text()) for name, path in places.items()}


def _score(side: Side, ids: Sequence[Sequence[int]], place: Path, piece: int) -> dict[str, Any]:
    answers = [
        side.ask("score", ids=list(row), reference=str(place / f"{number}.npy"), piece=piece)
        for number, row in enumerate(ids)
    ]
    return {key: [answer[key] for answer in answers] for key in ("kl", "top1", "nll", "nll_reference")}


def _key(kind: str, path: Path, ids: Sequence[Sequence[int]]) -> str:
    """The hash of what a score depends on: the files, the sequences, and the code that runs them."""
    found = hashlib.sha256(
        json.dumps([kind, WHEELS, SOURCE, THREADS, python_of(kind), [list(row) for row in ids]]).encode()
    )
    place = path / "onnx" if (path / "onnx").is_dir() else path
    home = Path(quantkit.__file__).parent
    code = [*(home / "runtimes" / "onnxruntime").glob("*.py")] if kind.startswith("quantkit") else []
    code += (home / "kernels" / "cpu").glob("*.[ch]") if kind == "quantkit_cpu" else []
    for file in [*([place] if place.is_file() else sorted(place.glob("model.onnx*"))), *sorted(code)]:
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:32]
