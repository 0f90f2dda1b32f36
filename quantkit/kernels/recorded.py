"""The choices that were measured on a device, as a bundle carries them: `kernels.json`.

    {"schema": 1, "device": {"id", "kind", "name"}, "versions": {"torch", "triton", ...}, "variant": "int4.g64.zeros",
     "table": what `dispatch.Table.as_dict` gives}

They hold for the device alone: tile sizes that are the fastest on one card spill or starve on another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.kernels.dispatch import Table

FILE = "kernels.json"


@dataclass(frozen=True)
class Recorded:
    """See the module.

    Args:
        device: `id`, `kind` and `name`, as in rows of measurements.
        versions: of torch and Triton.
        variant: the format that was timed.
        table: the choices.
    """

    device: Mapping[str, str]
    versions: Mapping[str, str]
    variant: str
    table: Table

    def as_bytes(self) -> bytes:
        """The file."""
        data = {"schema": 1, "device": dict(self.device), "versions": dict(self.versions), "variant": self.variant}
        return (json.dumps({**data, "table": self.table.as_dict()}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def of(cls, data: bytes) -> Recorded:
        """The inverse of `as_bytes`.

        Raises:
            InputError: `dispatch-invalid`.
        """
        try:
            found = json.loads(data)
            if found["schema"] != 1:
                raise KeyError("schema 1")
            return cls(found["device"], found["versions"], found["variant"], Table.of(found["table"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "dispatch-invalid",
                where=FILE,
                value=str(error),
                rule="a file as `quantkit tax BUNDLE --device cuda` writes it",
                remedy="run that again",
            ) from None
