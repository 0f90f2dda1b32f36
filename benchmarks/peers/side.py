"""What every side of a comparison shares: request, clock, score, size. Knows torch and transformers, not quantkit.

score: mean over all positions of KL(original || quantized), nats a token; the standard error is that of the means of
       the sequences, because positions of one sequence are not independent
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


@dataclass
class Scheme:
    """What is asked of every side alike.

    Args:
        bits: of a weight's code.
        format: `int`, `float` (e4m3) or `nf4`.
        group: inputs that share a scale; None is one scale an output channel.
        symmetric: without zero points.
        activations: quantized as well, dynamically per token.
    """

    bits: int
    format: str = "int"
    group: int | None = 64
    symmetric: bool = False
    activations: bool = False


SCHEMES = (
    {"int4-g64": Scheme(4), "int4-g64-symmetric": Scheme(4, symmetric=True), "int3-g64": Scheme(3)}
    | {"int2-g32": Scheme(2, group=32)}
    | {"int4-channel": Scheme(4, group=None, symmetric=True), "nf4-b64": Scheme(4, format="nf4", symmetric=True)}
    | {"int8-w8a8": Scheme(8, group=None, symmetric=True, activations=True)}
    | {"fp8-w8a8": Scheme(8, format="float", group=None, symmetric=True, activations=True)}
)


@dataclass
class Quantized:
    """What a side made.

    Args:
        load: gives the model to score, read back from what was saved.
        reader: the library whose code turns the saved files into that model.
        cpu_seconds: of quantizing, packing and saving.
        cpu_seconds_quantize: of quantizing alone.
        wall_seconds: of all of it.
        packages: whose versions to record.
        settings: what was asked of the peer, as it was asked.
        calibrated: whether it saw the calibration ids.
        bits_per_weight: None is what `bits_per_weight` finds on disk.
        notes: what was patched or is different.
    """

    load: Callable[[], Any]
    reader: str
    cpu_seconds: float
    cpu_seconds_quantize: float
    wall_seconds: float
    packages: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    calibrated: bool = True
    bits_per_weight: float | None = None
    notes: list[str] = field(default_factory=list)


class Clock:
    """Processor and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    @property
    def cpu(self) -> float:
        """Processor seconds."""
        return time.process_time() - self._cpu

    @property
    def wall(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._wall


def original(folder: str | Path, **options: Any) -> Any:
    """The float model, or what plain transformers makes of a checkpoint."""
    options |= {"dtype": torch.float32, "local_files_only": True}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def while_loading(request: dict[str, Any], config: Any, settings: dict[str, Any], *, package: str) -> Quantized:
    """Quantized by transformers while it loads, so the clock includes loading; saved and loaded again."""
    clock = Clock()
    model = original(request["model"], device_map="cpu", quantization_config=config)
    spent = clock.cpu
    model.save_pretrained(request["out"])
    return Quantized(
        lambda: original(request["out"], device_map="cpu"),
        f"transformers with {package}",
        clock.cpu,
        spent,
        clock.wall,
        (package,),
        settings,
        calibrated=False,
        notes=["the clock includes loading"],
    )


def calibration(request: dict[str, Any]) -> list[list[int]]:
    """The token ids to calibrate on."""
    lines = Path(request["ids"]).read_text().splitlines()[: request["samples"]]
    return [json.loads(line)["input_ids"] for line in lines]


def bits_per_weight(saved: Path, source: Path) -> float | None:
    """What the linears of the blocks take on disk in safetensors, scales and zero points included, biases not.

    None where what was saved is another kind of file, or names nothing as the source does.
    """
    linears = {
        name.removesuffix(".weight"): math.prod(shape)
        for name, (shape, _) in _tensors(source).items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2
    }
    stored = dict.fromkeys(linears, 0)
    for name, (_, size) in _tensors(saved).items():
        owner = next((owner for owner in _parents(name) if owner in stored), None)
        if owner is not None and name != f"{owner}.bias":
            stored[owner] += size
    if not all(stored.values()):
        return None
    return 8 * sum(stored.values()) / sum(linears.values())


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _tensors(folder: Path) -> dict[str, tuple[list[int], int]]:
    """Name -> shape and bytes, from the headers of a folder's safetensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = (entry["shape"], end - begin)
    return found


@torch.no_grad()
def reference(folder: str, texts: dict[str, str], out: Path) -> None:
    """The float model's logits, `NAME.npy` a text, float32 [sequences, tokens - 1, vocabulary]: once for all sides."""
    missing = {name: path for name, path in texts.items() if not (out / f"{name}.npy").exists()}
    if not missing:
        return
    out.mkdir(parents=True, exist_ok=True)
    model = original(folder)
    for name, path in missing.items():
        ids = json.loads(Path(path).read_text())
        shape = (len(ids), len(ids[0]) - 1, model.config.get_text_config().vocab_size)
        partial = out / f"{name}.partial"
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
        for number, row in enumerate(ids):
            array[number] = model(torch.tensor([row])).logits[0, :-1].numpy()
        array.flush()
        partial.rename(out / f"{name}.npy")


@torch.no_grad()
def score(logits: Any, candidate: Any, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Figures of a candidate on [sequences, tokens] against the original's logits there."""
    divergence, agreement, nll, before = [], [], [], []
    for row, known in zip(sequences, logits, strict=True):
        ids = torch.tensor([row])
        right = torch.log_softmax(candidate(ids).logits[0, :-1].float(), dim=-1)
        left = torch.log_softmax(torch.from_numpy(np.array(known)), dim=-1)
        nll.append(-float(right.gather(1, ids[0, 1:, None]).double().mean()))
        before.append(-float(left.gather(1, ids[0, 1:, None]).double().mean()))
        agreement.append(float((left.argmax(-1) == right.argmax(-1)).double().mean()))
        # float32, summed in double precision: the noise of a mean is below 1e-6 nats
        apart = [(p.exp() * (p - q)).sum(-1, dtype=torch.float64) for p, q in zip(left, right, strict=True)]
        divergence.append(float(torch.stack(apart).mean()))
    spread = torch.tensor(divergence, dtype=torch.float64)
    return (
        {"sequences": len(sequences), "n": sum(len(row) - 1 for row in sequences), "kl": float(spread.mean())}
        | {"kl_se": float(spread.std() / math.sqrt(len(spread))), "kl_by_sequence": divergence}
        | {"top1": sum(agreement) / len(agreement), "perplexity": math.exp(sum(nll) / len(nll))}
        | {"perplexity_reference": math.exp(sum(before) / len(before))}
    )


def serve(quantize: Callable[[dict[str, Any], Scheme], Quantized]) -> None:
    """`python PEER.py request.json answer.json`."""
    asked, answered = (Path(argument) for argument in sys.argv[1:])
    request = json.loads(asked.read_text())
    torch.set_num_threads(request["threads"])
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = quantize(request, SCHEMES[request["scheme"]])
    known = Path(request["reference"])
    reference(request["model"], request["texts"], known)
    candidate = made.load()
    figures = {
        name: score(np.load(known / f"{name}.npy", mmap_mode="r"), candidate, json.loads(Path(path).read_text()))
        for name, path in request["texts"].items()
    }
    answer = (
        {"texts": figures}
        | {"bits_per_weight": made.bits_per_weight or bits_per_weight(Path(request["out"]), Path(request["model"]))}
        | {"cpu_seconds": made.cpu_seconds, "cpu_seconds_quantize": made.cpu_seconds_quantize}
        | {"wall_seconds": made.wall_seconds, "reader": made.reader, "settings": made.settings}
        | {"calibrated": made.calibrated, "notes": made.notes}
        | {"versions": {name: importlib.metadata.version(name) for name in (*made.packages, "torch", "transformers")}}
    )
    answered.write_text(json.dumps(answer))
