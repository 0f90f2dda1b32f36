"""A device that is a folder of this machine: by `sh -c` in place of `ssh`, with the very wheel that a device gets."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit.devices import probed as wheels
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link
from quantkit.devices.named import NamedDevice, Reached
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import probe
from quantkit.errors import Stopped
from quantkit.runtimes.child import Report

# this machine is many devices
BEGIN = ("env", "QUANTKIT_LOCK=", "sh", "-c")
# a device has none of these
ABSENT = ("torch", "transformers", "scipy", "onnx", "onnx_ir", "tokenizers", "plotly", "psutil")


def local(
    workdir: Path,
    name: str = "local",
    *,
    absent: Sequence[str] = (),
    link: Callable[..., Link] = Link,
    begin: Sequence[str] = BEGIN,
    python: str = sys.executable,
    **about: Any,
) -> Reached:
    """A device.

    Args:
        workdir: its folder.
        absent: packages that cannot be imported there.
        link: what makes the way to it.
        begin: what runs a shell's command there.
        python: its Python.
        about: what it says of itself, in place of what this machine is.
    """
    shell = OpenSSH(Address("here"), name=name, begin=begin, python=python)
    beside = workdir.parent / "wheels"
    beside.mkdir(parents=True, exist_ok=True)
    own = wheels.own_wheel(beside)
    brought = {hashlib.sha256(own.read_bytes()).hexdigest(): own}
    if absent:
        wheel = beside / "absent.whl"
        with zipfile.ZipFile(wheel, "w") as made:
            for package in absent:
                made.writestr(f"{package}.py", f"raise ModuleNotFoundError({package!r}, name={package!r})\n")
        brought = {hashlib.sha256(wheel.read_bytes()).hexdigest(): wheel, **brought}
    device = NamedDevice(name=name, address="ssh://here", workdir=str(workdir))
    found = probe(shell, str(workdir)).model_copy(update=about)
    return Reached(device, found, link(shell, str(workdir), wheels=brought, patience=30.0))


class Cut(Link):
    """A way that ends after some cells, until `left` is set anew."""

    left, cells = 0, ("decode", "prefill")

    def run(self, work: str, job: Any, progress: Report | None = None, *, row: Any = None, **how: Any) -> Cells:
        def come(cells: Cells, cell: str) -> None:
            if cell.startswith(self.cells):
                self.left -= 1
                if self.left < 0:
                    raise Stopped("device-gone", where=self.name)
            if row is not None:
                row(cells, cell)

        return super().run(work, job, progress, row=come, **how)
