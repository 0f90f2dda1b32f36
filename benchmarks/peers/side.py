"""What every side of a comparison shares: request, clock, score. Knows torch and transformers, not quantkit.

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


SCHEMES = {
    "int4-g64": Scheme(4),
    "int4-g64-symmetric": Scheme(4, symmetric=True),
    "int3-g64": Scheme(3),
    "int4-channel": Scheme(4, group=None, symmetric=True),
    "nf4-b64": Scheme(4, format="nf4", symmetric=True),
    "int8-w8a8": Scheme(8, group=None, symmetric=True, activations=True),
    "fp8-w8a8": Scheme(8, format="float", group=None, symmetric=True, activations=True),
}


@dataclass
class Quantized:
    """What a side made.

    Args:
        load: gives the model to score.
        cpu_seconds: of quantizing, packing and saving.
        cpu_seconds_quantize: of quantizing alone.
        wall_seconds: of all of it.
        packages: whose versions to record.
        reloaded: whether `load` reads back what was saved.
        notes: what was patched or is different.
    """

    load: Callable[[], Any]
    cpu_seconds: float
    cpu_seconds_quantize: float
    wall_seconds: float
    packages: Sequence[str]
    reloaded: bool = True
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


def original(folder: str | Path) -> Any:
    """The float model."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def calibration(request: dict[str, Any]) -> list[list[int]]:
    """The token ids to calibrate on."""
    lines = Path(request["ids"]).read_text().splitlines()[: request["samples"]]
    return [json.loads(line)["input_ids"] for line in lines]


@torch.no_grad()
def score(reference: Any, candidate: Any, sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    """Figures of a candidate on [sequences, tokens]."""
    divergence, agreement, nll, before = [], [], [], []
    for row in sequences:
        ids = torch.tensor([row])
        left = torch.log_softmax(reference(ids).logits[0, :-1].double(), dim=-1)
        right = torch.log_softmax(candidate(ids).logits[0, :-1].double(), dim=-1)
        divergence.append(float((left.exp() * (left - right)).sum(-1).mean()))
        agreement.append(float((left.argmax(-1) == right.argmax(-1)).double().mean()))
        nll.append(float(-right.gather(1, ids[0, 1:, None]).mean()))
        before.append(float(-left.gather(1, ids[0, 1:, None]).mean()))
    spread = torch.tensor(divergence, dtype=torch.float64)
    return {
        "n": sum(len(row) - 1 for row in sequences),
        "kl": float(spread.mean()),
        "kl_se": float(spread.std() / math.sqrt(len(spread))),
        "top1": sum(agreement) / len(agreement),
        "perplexity": math.exp(sum(nll) / len(nll)),
        "perplexity_reference": math.exp(sum(before) / len(before)),
    }


def serve(quantize: Callable[[dict[str, Any], Scheme], Quantized]) -> None:
    """`python PEER.py request.json answer.json`."""
    asked, answered = (Path(argument) for argument in sys.argv[1:])
    request = json.loads(asked.read_text())
    torch.set_num_threads(request["threads"])
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = quantize(request, SCHEMES[request["scheme"]])
    figures = score(original(request["model"]), made.load(), json.loads(Path(request["eval"]).read_text()))
    answer = {
        **figures,
        "cpu_seconds": made.cpu_seconds,
        "cpu_seconds_quantize": made.cpu_seconds_quantize,
        "wall_seconds": made.wall_seconds,
        "reloaded": made.reloaded,
        "notes": made.notes,
        "versions": {name: importlib.metadata.version(name) for name in (*made.packages, "torch", "transformers")},
    }
    answered.write_text(json.dumps(answer))
