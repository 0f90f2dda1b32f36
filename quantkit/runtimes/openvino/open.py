"""Compile a bundle's `model.xml` by OpenVINO for a device, with all rounding under control.

By default the CPU plug-in rounds a cache to 8 bits, inputs of products with compressed weights to 8 bits a group, and,
on CPUs with AMX, all arithmetic to bfloat16. Here only inputs of products are rounded, and only if the file asks for it
(`accuracy_level: 4`). Properties:
https://docs.openvino.ai/2026/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.errors import InputError, MissingDependency

if TYPE_CHECKING:
    import openvino


FOLDER, MODEL, WEIGHTS = "openvino", "model.xml", "model.bin"
# inputs that share a scale when they are rounded; the plug-in's default
_GROUP = 32


def read(path: Path) -> openvino.Model:
    """Read the model of a file.

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
    """Return the exporter's metadata in the file."""
    place = "quantkit"
    if not model.has_rt_info([place]):
        return {}
    return {
        f"{place}.{name}": str(value.astype(str)) for name, value in model.get_rt_info([place]).astype(dict).items()
    }


def compiled(model: openvino.Model, path: Path, threads: int, device: str, level: int) -> Any:
    """Compile the model for a device.

    Args:
        path: path of the model, for errors.
        threads: threads of a CPU.
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
    rule = f"OpenVINO {library().__version__.split('-')[0]} loads it"
    remedy = "`quantkit verify` shows whether a file has changed; else update openvino, or export again"
    return InputError("openvino-unreadable", str(path), value, rule, remedy)


Device = Literal["CPU", "GPU", "NPU", "AUTO"]


def library() -> Any:
    """Import OpenVINO. Raises MissingDependency."""
    with MissingDependency.unless_found("openvino", extra="openvino", purpose="running or writing openvino/model.xml"):
        import openvino
    return openvino


def first_line(problem: Exception) -> str:
    """Return the message of an error, without the places in OpenVINO's source that precede it."""
    lines = [line.strip() for line in str(problem).splitlines()]
    messages = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return (messages or [line for line in lines if line] or [type(problem).__name__])[0][:200]


def why_no(device: str) -> str | None:
    """Return the reason why a device is not available, or None; AUTO takes any. Raises MissingDependency."""
    devices = library().Core().available_devices
    if device == "AUTO" or any(name.split(".")[0] == device for name in devices):
        return None
    return f"OpenVINO finds no {device} on this machine; it finds {', '.join(devices) or 'no device'}"


def demand_device(device: str) -> None:
    """Refuse a missing device. Raises InputError `runtime-not-here`; MissingDependency."""
    if why := why_no(device):
        rule = "the device and its driver are there"
        remedy = "run it on a machine that has one, or export it with `openvino: {device: CPU}`"
        raise InputError("runtime-not-here", f"openvino on {device}", why, rule, remedy)
