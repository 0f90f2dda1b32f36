"""OpenVINO: the package, and the devices that it finds here."""

from __future__ import annotations

from typing import Any, Literal

from quantkit.errors import InputError, MissingDependency

Device = Literal["CPU", "GPU", "NPU", "AUTO"]


def library() -> Any:
    """The package. Raises MissingDependency."""
    with MissingDependency.unless_found("openvino", extra="openvino", purpose="running or writing openvino/model.xml"):
        import openvino
    return openvino


def first_line(problem: Exception) -> str:
    """What went wrong, without the places in OpenVINO's source that its messages begin with."""
    lines = [line.strip() for line in str(problem).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return (said or [line for line in lines if line] or [type(problem).__name__])[0][:200]


def why_no(device: str) -> str | None:
    """Why a device is not at hand; None where it is. AUTO takes what there is. Raises MissingDependency."""
    found = library().Core().available_devices
    if device == "AUTO" or any(name.split(".")[0] == device for name in found):
        return None
    return f"OpenVINO finds no {device} on this machine; it finds {', '.join(found) or 'no device'}"


def demand_device(device: str) -> None:
    """Raises InputError `runtime-not-here`; MissingDependency."""
    if why := why_no(device):
        raise InputError(
            "runtime-not-here",
            where=f"openvino on {device}",
            value=why,
            rule="the device and its driver are there",
            remedy="run it on a machine that has one, or export it with `openvino: {device: CPU}`",
        )
