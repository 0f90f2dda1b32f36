"""Room on a device: what was carried there and nothing needs any more is removed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quantkit.content import Closed, validated
from quantkit.devices.answers import Bytes
from quantkit.devices.named import NamedDevice
from quantkit.devices.reached import shell
from quantkit.devices.ssh.link import busy

_Number = Annotated[int, Field(ge=0, le=1 << 30)]


class Cleaned(Closed):
    """What was removed: how many of each, and bytes."""

    bundles: _Number
    wheels: _Number
    bytes: Bytes


def clean(device: NamedDevice) -> Cleaned:
    """Remove the bundles and wheels there that no unfinished job names; what is needed again is carried again.

    Raises:
        InputError: `device-busy`; `workdir-foreign`; what keeps one out.
        Stopped: `device-gone`.
    """
    with shell(device) as way:
        found = way.call("store", {"workdir": device.workdir, "do": "clean"}, seconds=600.0)
    if "holder" in found:
        raise busy(device.name, found["holder"])
    return validated(Cleaned, found, where=device.name, code="answer-invalid", rule="what was removed, in numbers")
