"""What a compile will take of memory and disk, and where it computes: `planning/compiling.py` of an open model.

Nothing is assumed of the model here: its linears are those that will be quantized, its tokens those that were loaded.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters import reader
from quantkit.model.device import AUTO, CPU, ComputeDevice, absent, demand_name, present
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, BlockShapes, Matrix
from quantkit.pipeline.baseline import place
from quantkit.pipeline.request import runs_here
from quantkit.planning.compiling import USABLE, CompileSpec, Compiling, Fit, described, fit, predict, timed
from quantkit.report.kit import words
from quantkit.runtimes import load_runtime
from quantkit.target import Target

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.opened import Prepared
    from quantkit.recipe import Recipe
    from quantkit.scheme import WeightScheme

# what is said of time before anything ran
UNTIMED = "its time is known after the first block"
_PROCESSORS = "memory is a processor's: no compile on a GPU was measured yet"


def estimate(prepared: Prepared) -> Compiling:
    """For a request whose inputs were opened, on this machine's processor; of a GPU's compile it says so."""
    expected = predict(spec(prepared))
    return expected if prepared.device.is_cpu else replace(expected, notes=(*expected.notes, _PROCESSORS))


def line(expected: Compiling) -> str:
    """For people, before work starts."""
    disk = expected.disk
    space = f"{words.size(disk.bundle)} of disk ({words.size(disk.most)} while at it)"
    kept = f", {words.size(disk.cache)} for the float baseline" if disk.cache else ""
    kept += f"; {_PROCESSORS}" if _PROCESSORS in expected.notes else ""
    return f"expected: {words.size(expected.peak)} of memory, {space}{kept}; {UNTIMED}"


def unopened(
    architecture: Architecture, recipe: Recipe, *, speed: bool, device: str = CPU, target: Target | None = None
) -> Compiling:
    """For a model whose config alone was read.

    Args:
        recipe: its exports those that the target reads.
        speed: whether the target is this machine, so that what is exported is timed.
        device, target: as of `foreseen_device`.

    Raises:
        InputError: what the compile would refuse by the sizes alone; `compile-unknown`, a network of images.
    """
    sizes = described(architecture, recipe, speed=speed and has_timer(recipe))
    expected = predict(sizes)
    if device == CPU or target is None:
        return expected
    place_, lies = foreseen_device(device, sizes, target)
    notes = (*expected.notes, f"compiles {place_}", *([_PROCESSORS] if lies else []))
    return replace(expected, notes=notes, device=lies.as_dict() if lies else None)


def spec(prepared: Prepared) -> CompileSpec:
    """The compile in sizes."""
    model = architecture(prepared)
    named = {matrix.name: _scheme(prepared, matrix.name) for matrix in _all(model)}
    samples, length = prepared.calibration.ids.shape if prepared.calibration is not None else (0, 0)
    scored, scored_length = prepared.scoring.ids.shape
    if prepared.scoring.pairs is not None:  # both texts of each
        scored = 2 * prepared.scoring.items
    exported, is_timed = timed(prepared.request.recipe), times(prepared)
    return CompileSpec(
        model,
        prepared.request.recipe,
        {name: scheme for name, scheme in named.items() if scheme is not None},
        samples,
        length,
        scored * scored_length,
        scored_length,
        timed=is_timed,
        baseline=is_timed
        and exported is not None
        and not place(prepared.original, exported.name, exported.options).exists(),
        beside=_beside(prepared.stream, model.hidden),
    )


def chosen_device(prepared: Prepared) -> tuple[ComputeDevice, str]:
    """Where a compile computes, and why, in sizes that are known before it begins.

    Raises:
        InputError: `device-absent`; `device-memory`, where it was named and a block does not fit.
    """
    asked = prepared.request.device
    name = "cuda" if asked == AUTO else asked
    try:
        name, model, free = present(name)
    except InputError as problem:
        if asked != AUTO:
            raise
        return ComputeDevice(), f"on the processor: {problem.value}; products in float32"
    found = fit(replace(spec(prepared), live=prepared.stream.flow.live), free)
    said = _lies(found, asked, model)
    if not found.fits:
        return ComputeDevice(), f"{said}; products in float32"
    device = ComputeDevice(name, model, found.chunk, found.resident, prepared.request.tf32)
    return device, f"{said}; products in {device.products}"


def _lies(found: Fit, asked: str, model: str) -> str:
    """How a compile lies on a GPU, in words. Raises InputError (`device-memory`), if it was named and does not fit."""
    if found.fits:
        where = "stay on it" if found.resident else "lie in memory"
        at_once = f"{words.plural(found.chunk, 'sequence')} at once, hidden states {where}"
        return f"on {model}: {words.size(found.needed)} of {words.size(found.free)} free; {at_once}"
    need = f"blocks with their activations take {words.size(found.needed)}, "
    need += f"{words.size(USABLE * found.free)} can be used of {words.size(found.free)} that are free"
    if asked == AUTO:
        return f"on the processor: on {model} {need}"
    raise InputError(
        "device-memory",
        where=f"--device {asked}",
        value=f"{model}: {need}",
        rule="a block, the factor of its widest input, embedding and head, and one sequence lie on the device",
        remedy="--device cpu; or fewer tokens a sequence: --set calibration.tokens=256",
    )


def foreseen_device(asked: str, sizes: CompileSpec, target: Target) -> tuple[str, Fit | None]:
    """How a compile will lie on a device, for a plan: in words, and in bytes if it is a GPU. Torch is not needed.

    Args:
        asked: as `--device` of a compile.
        target: whose memory is taken where this machine has no GPU.

    Raises:
        InputError: `unknown-device`, `device-absent`, `device-memory`.
    """
    if demand_name(asked) == CPU:
        return "on the processor", None
    here, reason = machine.gpus()
    number = int(asked.partition(":")[2] or 0)
    capacity = target.memory.capacity.number if target.kind == "gpu" else None
    if number < len(here):
        model, size = str(here[number]["name"]), float(here[number]["memory"])
    elif capacity is not None and not here and not number:
        model, size = f"{target.name}, which is not here ({reason})", capacity
    elif asked == AUTO:
        return f"on the processor: {reason}", None
    else:
        raise absent(asked, reason or f"{len(here)} GPUs are here")
    found = fit(sizes, size)
    return _lies(found, asked, model), found


def _beside(stream: StreamedModel, hidden: int) -> int:
    """Values of a token that are looked up for blocks beside its hidden states: an embedding outside the blocks that is
    wider than those has a part for each block."""
    from torch import nn

    tables = [
        module
        for name, module in stream.skeleton.named_modules()
        if isinstance(module, nn.Embedding) and not name.startswith(f"{stream.path}.")
    ]
    return sum(table.embedding_dim for table in tables if table.embedding_dim > hidden)


def architecture(prepared: Prepared) -> Architecture:
    """The model in sizes: by its config, where that gives the linears that it has; else by its modules.

    What the modules do not tell is how attention looks at tokens: it is then left out of what a forward computes.
    """
    source, shapes = prepared.source, prepared.layers.inside
    if configs.is_known(source.config):
        try:
            found = configs.from_config(source.config, source.name)
        except InputError:
            pass
        else:
            mine = {
                name: shape for name, shape in shapes.items() if any(_stands(m, name, shape) for m in found.inside())
            }
            if len(mine) == len(shapes) == sum(matrix.count for matrix in found.inside()):
                return found
    stream = prepared.stream
    layers = []
    for name in stream.block_names:
        matrices = [Matrix(each, *shape) for each, shape in shapes.items() if each.startswith(f"{name}.") or not name]
        layers.append(BlockShapes(name, matrices, None))
    inside = sum(matrix.parameters for layer in layers for matrix in layer.matrices)
    head = stream.skeleton.get_parameter(f"{stream.head}.weight").shape if stream.head else None
    config = source.config
    sizes = (config.get("hidden_size"), config.get("n_embd"), config.get("d_model"))
    hidden = next((size for size in sizes if isinstance(size, int)), prepared.layers.widest)
    stored = sum(value.numel() for value in stream.skeleton.parameters())
    return Architecture(
        name=source.name,
        kind=source.kind,
        model_type=str(config.get("model_type", "")),
        dtype=source.dtype,
        hidden=hidden,
        layers=layers,
        embeddings=max(stored - inside, 0),
        others=0,
        head=Matrix(str(stream.head), *head) if head is not None else None,
        tied=True,  # the embedding's elements hold those of a head of its own
        assumed=("its linears alone: its config is not known",),
    )


def _stands(matrix: Matrix, name: str, shape: tuple[int, int]) -> bool:
    """Whether an entry of an architecture is a linear of the model, or one of many experts'."""
    return shape == (matrix.N, matrix.K) and (matrix.name == name or fnmatchcase(name, matrix.name))


def _all(model: Architecture) -> list[Matrix]:
    return [*model.inside(), *([model.head] if model.head is not None else [])]


def _scheme(prepared: Prepared, name: str) -> WeightScheme | None:
    schemes = prepared.layers.schemes
    if "*" in name:
        return next((scheme for each, scheme in schemes.items() if fnmatchcase(each, name)), None)
    return schemes.get(name)


def demand_disk(expected: Compiling, out: Path) -> None:
    """Refuse a build that takes more bytes than are free. Raises InputError `disk-space`."""
    need = expected.disk.most
    place = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), Path())
    free = shutil.disk_usage(place).free
    if need > free:
        raise InputError(
            "disk-space",
            where=str(out),
            value=f"about {words.size(need)} while it is built",
            rule=f"{words.size(free)} are free there",
            remedy="free some space, or choose --out on another disk",
        )


def times(prepared: Prepared) -> bool:
    """Whether the result will be timed: something of it can be, and the target is this machine."""
    request = prepared.request
    return request.speed and bool(prepared.layers.schemes) and runs_here(request.target) and has_timer(request.recipe)


def has_timer(recipe: Recipe) -> bool:
    """Whether what times a recipe's export is here."""
    step = timed(recipe)
    return step is not None and load_runtime(reader(step.name, step.options)).why_not_here() is None


def head_size(prepared: Prepared) -> int:
    """Weights of the language-model head."""
    config = prepared.source.config
    return int(config.get("vocab_size", 0)) * int(config.get("hidden_size", config.get("n_embd", 0)))
