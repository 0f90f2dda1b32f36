"""A device as a target: the shipped one of its architecture, with the figures that were measured there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import yaml

from quantkit.bundle.disk import write_atomic, writing
from quantkit.content import find, read_yaml
from quantkit.devices.named import target_path
from quantkit.devices.probed import Probed
from quantkit.measurement.doctor import figures
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.target import Target

_ARM = ("aarch64", "arm64")


def target_of(name: str, about: Probed, found: Sequence[Ceiling], when: date) -> Target:
    """Its processor as a target.

    Args:
        name: of the device.
        about: what it says of itself.
        found: as `ceilings.measured` gives them for `read`, `copy` and `compute`.
        when: they were measured.
    """
    base = _shipped(about)
    # as it ships: what this machine has measured for itself is not the device's
    target = Target.from_dict(read_yaml(find("export", base)), name=name)
    measured = figures(target, found, {"memory_limit": about.memory, "last_level_cache": about.last_level_cache})
    source = f"measured by quantkit device doctor {name} on {about.processor}, {about.cores} cores, {when}"
    data = target.resolve({"figures": measured, "isa": about.isa, "source": source}).as_dict()
    summary = f"{about.model or about.processor}, {about.cores} cores: {name}, figures measured there on {when}"
    return Target.from_dict({**data, "summary": summary}, name=name)


def usual(name: str, about: Probed) -> str:
    """The target of what is measured on a device: its own, where it was written, else that of its architecture."""
    own = target_path(name)
    return str(own) if own.is_file() else _shipped(about)


def _shipped(about: Probed) -> str:
    return "cpu-arm" if about.machine.lower() in _ARM else "cpu-x86"


def write(target: Target) -> Path:
    """Its YAML, in the user's settings. Raises InputError `file-unwritable`, Stopped `disk-full`."""
    path = target_path(target.name)
    data = {key: value for key, value in target.as_dict().items() if key != "name" and value is not None}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).encode())
    return path
