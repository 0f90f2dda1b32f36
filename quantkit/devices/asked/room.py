"""What models take of a device's memory, reckoned here from what a plan knows, before anything is carried there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from quantkit.errors import InputError
from quantkit.measurement.timing.shapes import Shape
from quantkit.model.sizes import configs
from quantkit.pipeline.keep import export_of
from quantkit.planning.bound.memory import Footprint, cache_of, taken_by
from quantkit.planning.compiling import CompileSpec, peaks
from quantkit.recipe import ExportStep, Recipe

# bytes of an element that ONNX Runtime and OpenVINO compute in on a processor
_WIDTH = 4
# keys and values: llama.cpp keeps them in 16 bits, the others in what they compute in
_CACHES = {"llama_cpp": "float16"}


class Ready(Protocol):
    """What is done before anything of a job is carried: see `Reached.ready`."""

    def __call__(self, models: Iterable[Path], running: float = 0.0) -> None:
        """Args: models: files of weights, all loaded at once; running: bytes besides, while they run."""
        ...


def unasked(models: Iterable[Path], running: float = 0.0) -> None:
    """A `Ready` that refuses nothing."""


def running(model: Path, shapes: Iterable[Shape], runtime: str) -> float:
    """Bytes of cache, activations and logits in the smallest of some shapes: those that are too large are left out
    there, each with its reason, but one has to fit.

    Args:
        model: a bundle, or a folder with `config.json`; of any other, a graph say, nothing is known, and that is 0.
        runtime: that runs it.
    """
    try:
        architecture = configs.read(str(model.absolute()))
    except InputError:
        return 0.0
    # its weights are weighed by their files: a graph is run as it is stored
    footprint = Footprint(
        architecture,
        (),
        cache_of(None, _CACHES.get(runtime, "float32")),
        _WIDTH,
        shared=False,
        runtime=taken_by(runtime, "cpu"),
        capacity=None,
        chunk=None,
        tables=0.0,
        others=0.0,
    )
    found = (footprint.parts(each.batch, each.context + each.tokens, prompt=each.tokens) for each in shapes)
    return min((sum(parts.values()) for parts in found), default=0.0)


def streamed(model: Path, recipe: Recipe, sequences: int, length: int) -> float:
    """Bytes of scoring a checkpoint beside its float model, both block by block in torch, as a compile does.

    Args:
        model: the float model's folder; of a config that a plan does not know nothing is known, and that is 0.
        recipe: of the finished bundle.
        sequences: that are scored, of `length` tokens each.
    """
    try:
        architecture = configs.read(str(model.absolute()))
    except InputError:
        return 0.0
    name = export_of("torch")
    as_compiled = recipe.model_copy(update={"export": [ExportStep(name=name, options={"layout": "pack-quantized"})]})
    found = peaks(CompileSpec(architecture, as_compiled, {}, 0, 0, sequences * length, length))
    return found[f"score {name}"]
