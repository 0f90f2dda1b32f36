"""The user's devices, each a YAML in the folder of settings: where it is and what it said when it was last probed.

No secret is in it: who may enter is between OpenSSH and the device.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import AfterValidator, Field

from quantkit.bundle.disk import write_atomic, writing
from quantkit.content import Closed, read_yaml, validated
from quantkit.devices.openssh import SCHEME, WORKDIR, Address, as_workdir
from quantkit.devices.probed import Probed
from quantkit.errors import InputError, did_you_mean

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
_PYTHON = re.compile(r"[A-Za-z0-9_.+/-]+")


class NamedDevice(Closed):
    """A device that has a name.

    Args:
        address: `ssh://…`.
        workdir: its folder there.
        python: the path of its Python; None: what is found there.
        wheelhouse: a folder here with wheels for it; None: they are fetched here, from the index of pip.
        about: what it said when it was probed.
        probed: when.
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
        """One without a name, by its address: it goes by all of that and its hash, as no other does."""
        address = Address.read(text, where="DEVICE")
        user, host = address.user or "", address.host.lower()
        own = Address(host, address.user, address.port)
        read = re.sub(r"[^a-z0-9_-]+", "-", "-".join([user, host, str(address.port or "")]).lower()).strip("-_")[:34]
        return cls(name=f"{read or 'device'}-{hashlib.sha256(str(own).encode()).hexdigest()[:6]}", address=text)

    def text(self) -> str:
        """YAML, for a file or another machine."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)

    @classmethod
    def read(cls, text: str, *, where: str) -> Self:
        """One of its `text`. Raises InputError `device-invalid`."""
        return validated(cls, yaml.safe_load(text), where=where, code="device-invalid")

    def save(self) -> Path:
        """Keep it for this user. Raises InputError `file-unwritable`."""
        path = _path(self.name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.text().encode())
        return path

    def remove(self) -> None:
        """Forget it; what lies there stays."""
        _path(self.name).unlink(missing_ok=True)
        target_path(self.name).unlink(missing_ok=True)


def folder() -> Path:
    """Of the user's devices: `$XDG_CONFIG_HOME/quantkit/devices`, else `~/.config/quantkit/devices`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".config") / "quantkit" / "devices"


def _path(name: str) -> Path:
    return folder() / f"{name}.yaml"


def target_path(name: str) -> Path:
    """Of the target that was measured on a device."""
    return folder() / "targets" / f"{name}.yaml"


def names() -> list[str]:
    """Of all devices, sorted."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def demand_name(name: str) -> str:
    """A name for a device. Raises InputError `usage`."""
    if not _NAME.fullmatch(name):
        rule = "a device's name is of small letters, digits, '-' and '_'"
        raise InputError("usage", where="NAME", value=name[:80], rule=rule, remedy="pi5")
    return name


def find(text: str, *, where: str = "DEVICE") -> NamedDevice:
    """A device by its name, or by its address.

    Raises:
        InputError: `unknown-device`, `address-invalid`, `device-invalid`.
    """
    if text.startswith(SCHEME):
        return NamedDevice.at(text)
    if text not in names():
        raise InputError(
            "unknown-device",
            where=where,
            value=f"no device is called {text[:80]!r}",
            remedy=f"{did_you_mean(text, names())}; quantkit device add NAME ssh://USER@HOST",
        )
    path = _path(text)
    found = validated(
        NamedDevice, read_yaml(path), where=str(path), code="device-invalid", rule="a device is a YAML mapping"
    )
    Address.read(found.address, where=str(path))
    return found
