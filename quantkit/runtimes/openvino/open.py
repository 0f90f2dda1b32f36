"""A bundle's `model.xml` compiled by OpenVINO for a device: what is rounded, and by whom, is said here alone.

By itself the CPU plug-in rounds a cache to 8 bits, inputs of products with compressed weights to 8 bits a group, and,
where the processor has AMX, all arithmetic to bfloat16. Here nothing is rounded but the inputs of products, and these
only if the file asks for that (`accuracy_level: 4`).
Properties: https://docs.openvino.ai/2026/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.runtimes.openvino.library import demand_device, first_line, library

if TYPE_CHECKING:
    import openvino

FOLDER, MODEL, WEIGHTS = "openvino", "model.xml", "model.bin"
# inputs that share a scale, where they are rounded; what the plug-in itself takes
_GROUP = 32


def read(path: Path) -> openvino.Model:
    """The model of a file.

    Raises:
        MissingDependency: openvino. InputError: `openvino-unreadable`.
    """
    core = library().Core()
    if not path.with_suffix(".bin").is_file():
        raise _unreadable(path, f"no {path.with_suffix('.bin').name} beside it")
    try:
        return core.read_model(str(path))
    except RuntimeError as problem:
        raise _unreadable(path, first_line(problem)) from None


def noted(model: openvino.Model) -> dict[str, str]:
    """What the exporter wrote into the file."""
    place = "quantkit"
    if not model.has_rt_info([place]):
        return {}
    return {
        f"{place}.{name}": str(value.astype(str)) for name, value in model.get_rt_info([place]).astype(dict).items()
    }


def compiled(model: openvino.Model, path: Path, threads: int, device: str, level: int) -> Any:
    """The model as a device runs it.

    Args:
        path: for errors.
        threads: of a CPU.
        level: 4: inputs of compressed products are rounded to 8 bits in groups of 32; 0: nothing is rounded.

    Raises:
        InputError: `runtime-not-here`, `openvino-unreadable`.
    """
    demand_device(device)
    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if device == "CPU":
        settings |= {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP if level == 4 else 0,
        }
    try:
        return library().Core().compile_model(model, device, settings)
    except RuntimeError as problem:
        raise _unreadable(path, first_line(problem)) from None


def _unreadable(path: Path, value: str) -> InputError:
    return InputError(
        "openvino-unreadable",
        where=str(path),
        value=value,
        rule=f"OpenVINO {library().__version__.split('-')[0]} loads it",
        remedy="`quantkit verify` says whether a file differs; else update openvino, or export again",
    )
