"""Manage the user's devices, each a YAML file in the settings folder, and prepare one for jobs.

The YAML holds the address and the last probe. It holds no secret: OpenSSH and the device control access.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import AfterValidator, Field

from quantkit.bundle.disk import write_atomic, writing
from quantkit.content import Closed, read_yaml, validated
from quantkit.devices import probed
from quantkit.devices.link import Link
from quantkit.devices.openssh import SCHEME, WORKDIR, Address, OpenSSH, as_workdir
from quantkit.devices.probed import Probed
from quantkit.errors import InputError, did_you_mean
from quantkit.measurement.operators.ceilings import write_graphs
from quantkit.runtimes import load_runtime
from quantkit.runtimes.child import Report

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
_PYTHON = re.compile(r"[A-Za-z0-9_.+/-]+")
# side of the square matrices that are multiplied for a ceiling
SIZE = 1024


class NamedDevice(Closed):
    """A device with a name.

    Args:
        address: `ssh://…`.
        workdir: folder of quantkit there.
        python: path of its Python; None searches for one.
        wheelhouse: local folder with wheels for it; None fetches them here, from pip's index.
        about: result of the last probe.
        probed: date of the last probe.
    """

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)] = 1
    name: Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]
    address: str
    workdir: Annotated[str, AfterValidator(as_workdir)] = WORKDIR
    python: Annotated[str, Field(pattern=f"^{_PYTHON.pattern}$")] | None = None
    wheelhouse: str | None = None
    about: Probed | None = None
    probed: date | None = None

    @classmethod
    def at(cls, text: str) -> Self:
        """Name a device after its address and a hash of it, a name that no other device has."""
        address = Address.read(text, where="DEVICE")
        own = Address(address.host.lower(), address.user, address.port)
        words = "-".join([own.user or "", own.host, str(own.port or "")]).lower()
        read = re.sub(r"[^a-z0-9_-]+", "-", words).strip("-_")[:34]
        return cls(name=f"{read or 'device'}-{hashlib.sha256(str(own).encode()).hexdigest()[:6]}", address=text)

    def text(self) -> str:
        """Return its YAML, for a file or another machine."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)

    @classmethod
    def read(cls, text: str, *, where: str) -> Self:
        """Read the result of `text`. Raises InputError `device-invalid`."""
        return validated(cls, yaml.safe_load(text), where=where, code="device-invalid")

    def save(self) -> Path:
        """Save it for this user. Raises InputError `file-unwritable`."""
        path = _path(self.name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.text().encode())
        return path

    def remove(self) -> None:
        """Forget the device; its files stay there."""
        _path(self.name).unlink(missing_ok=True)
        target_path(self.name).unlink(missing_ok=True)


def folder() -> Path:
    """Return the folder of the user's devices: `$XDG_CONFIG_HOME/quantkit/devices`, else
    `~/.config/quantkit/devices`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".config") / "quantkit" / "devices"


def _path(name: str) -> Path:
    return folder() / f"{name}.yaml"


def target_path(name: str) -> Path:
    """Return the file of the target measured on a device."""
    return folder() / "targets" / f"{name}.yaml"


def names() -> list[str]:
    """List all devices, sorted."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def demand_name(name: str) -> str:
    """Refuse an invalid device name. Raises InputError `usage`."""
    if not _NAME.fullmatch(name):
        rule = "a device's name has lowercase letters, digits, '-' and '_'"
        raise InputError("usage", "NAME", name[:80], rule, "pi5")
    return name


def find(text: str, *, where: str = "DEVICE") -> NamedDevice:
    """Find a device by its name or address. Raises InputError `unknown-device`, `address-invalid`, `device-invalid`."""
    if text.startswith(SCHEME):
        return NamedDevice.at(text)
    if text not in names():
        value, remedy = f"no device is called {text[:80]!r}", did_you_mean(text, names())
        remedy += "; quantkit device add NAME ssh://USER@HOST"
        raise InputError("unknown-device", where=where, value=value, remedy=remedy)
    path, rule = _path(text), "a device is a YAML mapping"
    device = validated(NamedDevice, read_yaml(path), where=str(path), code="device-invalid", rule=rule)
    Address.read(device.address, where=str(path))
    return device


def shell(device: NamedDevice) -> OpenSSH:
    """Open a connection to a device, without running anything there yet."""
    return OpenSSH(Address.read(device.address), name=device.name, python=device.python)


@dataclass(frozen=True)
class Reached:
    """A probed device, ready for jobs.

    Args:
        device: the user's entry.
        about: its current state.
        link: connection.
    """

    device: NamedDevice
    about: Probed
    link: Link

    def prepare(self, models: Iterable[Path], running: float = 0.0, progress: Report | None = None) -> None:
        """Refuse models too large for the device, then carry the needed wheels, before any other file.

        Args:
            models: files of weights, all loaded at once.
            running: further bytes needed while they run.

        Raises InputError: `out-of-memory`; those of `Link.install`.
        """
        self.about.demand_memory(models, self.device.name, running)
        self.link.install(progress)

    def carry_graphs(self, progress: Report | None = None, size: int = SIZE) -> str:
        """Carry the graphs of its ceilings. Raises MissingDependency: onnx, here."""
        with tempfile.TemporaryDirectory(prefix="quantkit-graphs-") as folder:
            return self.link.carry("ceilings", {path.name: path for path in write_graphs(Path(folder), size)}, progress)


@contextmanager
def reach(on: str | NamedDevice, *, wheelhouse: Path | None = None, runtimes: Iterable[str] = ()) -> Iterator[Reached]:
    """Connect to a device for the length of a `with` block.

    Args:
        on: name, `ssh://…`, or device.
        wheelhouse: folder of wheels in place of the device's own.
        runtimes: runtimes to run there; their packages are carried unless present.

    Raises:
        InputError: `runtime-not-here`, a package that is never
            carried is missing; no such device; OpenSSH fails; the device cannot run jobs; `file-missing`, no such
            wheelhouse.
        Stopped: `device-gone`.
    """
    device = find(on) if isinstance(on, str) else on
    used = [load_runtime(name) for name in dict.fromkeys(runtimes)]
    house = wheelhouse or (Path(device.wheelhouse).expanduser() if device.wheelhouse else None)
    if house is not None and not house.is_dir():
        rule, remedy = "a wheelhouse is a folder of wheels", "pip download -d FOLDER, or leave out --wheelhouse"
        raise InputError("file-missing", "--wheelhouse", f"no folder {house}", rule, remedy)
    with shell(device) as way:
        about = probed.probe(way, device.workdir)
        about.demand(device.name)
        installed = about.installed([package for runtime in used for package in runtime.installed], device.name)
        more = [package for runtime in used for package in runtime.packages]
        wheels = probed.wheels(about, wheelhouse=house, where=device.name, more=more, installed=installed)
        yield Reached(device, about, Link(way, device.workdir, wheels=wheels))


def demand_sessions(runtimes: Iterable[str], *, text: bool = False) -> None:
    """Refuse a runtime without sessions on a device. Raises InputError `runtime-unsupported`.

    Args:
        text: True to refuse an engine instead, which does not generate token by token there.
    """
    what = "a device generates text in ONNX Runtime, OpenVINO, llama.cpp and torch"
    what = what if text else "a device times in turns in ONNX Runtime, OpenVINO and llama.cpp"
    for name in runtimes:
        runner = load_runtime(name)
        if (runner.engines or runner.own is not None) if text else runner.floats is None:
            rule, remedy = (
                f"{what}; use {name} with `measure`",
                "--runtime onnxruntime, or work on the device itself",
            )
            raise InputError("runtime-unsupported", "--on, --runtime", name, rule, remedy)
