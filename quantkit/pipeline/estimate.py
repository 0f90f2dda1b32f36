"""What a compile will take, said before it begins: seconds a stage, memory, disk. Guesses, and called so.

The rates are those of one ordinary core; progress corrects the time as it goes. Space is reckoned from shapes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import registry
from quantkit.errors import InputError
from quantkit.pipeline.baseline import place
from quantkit.pipeline.worth import quick, runs_here
from quantkit.report import words

if TYPE_CHECKING:
    from quantkit.pipeline.prepared import Prepared
    from quantkit.recipe import ExportStep

# multiply-adds a second of a core, and what Python with torch and transformers takes
_RATE = 35e9
_INTERPRETER = 0.5e9
# times the largest block: its weights dense, a copy, a Hessian, codes; measured on models from 135 M to 1.5 GB
_COPIES = 6
# of the activations of one forward, see `work.ACTIVATION_BYTES`; most chunks stay well below it
_ACTIVATIONS = 0.4e9


@dataclass(frozen=True)
class Estimate:
    """What is expected.

    Args:
        seconds: by stage, in order.
        memory: bytes at the peak.
        bundle: bytes of the result.
        work: bytes beside it while it is built.
        cache: bytes of the float baseline in the user's cache, if it has to be made.
    """

    seconds: dict[str, float]
    memory: float
    bundle: float
    work: float
    cache: float

    def line(self) -> str:
        """For people, before work starts."""
        space = f"{words.size(self.bundle)} of disk ({words.size(self.bundle + self.work)} while at it)"
        kept = f", {words.size(self.cache)} for the float baseline" if self.cache else ""
        about = words.about(sum(self.seconds.values()))
        return f"expected: {about}, {words.size(self.memory)} of memory, {space}{kept}"


def estimate(prepared: Prepared) -> Estimate:
    """For a request whose inputs were opened."""
    from quantkit.pipeline.work import looks_at_original

    shapes, schemes = prepared.layers.shapes, prepared.layers.schemes
    source = prepared.source
    weights = sum(rows * columns for rows, columns in shapes.values())
    blocks = max(len(prepared.stream.block_names), 1)
    block = 4 * sum(rows * columns for rows, columns in prepared.layers.inside.values()) / blocks
    whole = source.weights.total_bytes()
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(source.dtype, 4)
    rest = max(whole - width * sum(rows * columns for rows, columns in prepared.layers.inside.values()), 0)
    packed = 0.0
    for name, scheme in schemes.items():
        rows, columns = shapes[name]
        padded = columns + scheme.padding(columns)
        packed += rows * padded * registry.load("formats", scheme.format).bits_per_weight((rows, padded), scheme) / 8
    dense = whole - width * sum(shapes[name][0] * shapes[name][1] for name in schemes if name != prepared.layers.head)
    bundle = 0.0
    for step in prepared.request.recipe.export:
        stretch = 4 / width if step.name == "onnx" else 1.0
        bundle += packed + dense * stretch
    seen = prepared.calibration.ids.numel() if prepared.calibration else 0
    streams = 1 + looks_at_original(prepared.steps)
    hidden = 4.0 * streams * seen * int(source.config.get("hidden_size", source.config.get("n_embd", 0)))
    work = (weights if schemes else 0) + 2 * hidden
    memory = _INTERPRETER + 2 * rest * 4 / width + _COPIES * block + 2 * hidden + (_ACTIVATIONS if seen else 0.1e9)
    cache = whole * 4 / width if times(prepared) and not place(source, graph(prepared).options).exists() else 0.0
    return Estimate(_seconds(prepared), memory, bundle, work, cache)


def demand_disk(expected: Estimate, out: Path) -> None:
    """Refuse a build that cannot end.

    Raises:
        InputError: `disk-space`.
    """
    place = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), Path())
    free, need = shutil.disk_usage(place).free, expected.bundle + expected.work
    if need > free:
        raise InputError(
            "disk-space",
            where=str(out),
            value=f"about {words.size(need)} while it is built",
            rule=f"{words.size(free)} are free there",
            remedy="free some space, or choose --out on another disk",
        )


def times(prepared: Prepared) -> bool:
    """Whether the result will be timed: it has an ONNX graph, and the target is this machine."""
    request = prepared.request
    exported = any(step.name == "onnx" for step in request.recipe.export)
    return request.speed and exported and bool(prepared.layers.schemes) and runs_here(request.target)


def graph(prepared: Prepared) -> ExportStep:
    """The step of the recipe that exports ONNX."""
    return next(step for step in prepared.request.recipe.export if step.name == "onnx")


def head_size(prepared: Prepared) -> int:
    """Weights of the language-model head."""
    config = prepared.source.config
    return int(config.get("vocab_size", 0)) * int(config.get("hidden_size", config.get("n_embd", 0)))


def _seconds(prepared: Prepared) -> dict[str, float]:
    """From the matrix products of each stage."""
    import torch

    from quantkit.pipeline.work import looks_at_original

    rate = _RATE * torch.get_num_threads()
    weights = sum(rows * columns for rows, columns in prepared.layers.inside.values())
    scored = prepared.scoring.ids.numel()
    if prepared.scoring.pairs is not None:  # both texts of each
        scored += prepared.scoring.items * prepared.scoring.ids.shape[1]
    seen = prepared.calibration.ids.numel() if prepared.calibration else 0
    stages = {}
    if prepared.steps:
        passes = sum(1 + 2 * bool(step.needs) for step in prepared.steps) + 2 * looks_at_original(prepared.steps)
        stages["quantize"] = 1.0 + passes * 2 * weights * seen / rate + weights / 2e7
    exports = [step.name for step in prepared.request.recipe.export]
    graph = 12.0 + weights / 2e7 if "onnx" in exports else 0.0
    stages["export"] = 1.0 + weights / 1e8 + graph
    stages["check"] = 2.0 + weights / 2e7 * len(exports)
    if "tensorrt" in exports:
        # TensorRT-RTX on two cores: 110 s for SmolLM2-135M
        stages["build"] = 15.0 + weights / 1.2e6
    stages["score"] = 4.0 + (2 + 2 * len(exports)) * (weights + head_size(prepared)) * scored / rate
    if times(prepared):
        stages["speed"] = 30.0 + quick(prepared.source.kind).seconds + graph
    return stages
