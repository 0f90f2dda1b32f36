"""Stand in for a device by a folder of this machine: `sh -c` instead of `ssh`, with the very wheel that a device gets.

The wheel is built and unpacked once a run; a device links to it, and to the byte code that the first job there wrote.
One constant differs: a ceiling is measured twice, not seven times, which takes seconds of all cores at each job.
"""

import functools
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit.devices import probed as wheels
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link
from quantkit.devices.named import NamedDevice, Reached
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import Probed, probe
from quantkit.devices.sent import files
from quantkit.errors import Stopped
from quantkit.runtimes.child import Report

# this machine is many devices
BEGIN = ("env", "QUANTKIT_LOCK=", "sh", "-c")
_RUNS = "runs: int = 7"
# a device has none of these
ABSENT = ("torch", "transformers", "scipy", "onnx", "onnx_ir", "tokenizers", "plotly", "psutil")


class Near(Link):
    """Link to a folder of this machine, where packages need not be carried."""

    def install(self, progress: Report | None = None) -> None:
        """Link to the wheels' contents, unpacked once a run; `test_link.py` and `test_wheels.py` carry wheels."""
        place = Path(self._workdir)
        files.main({"workdir": str(place), "do": "have", "name": "wheels", "files": []})  # makes the folder
        (place / "wheels").mkdir(exist_ok=True)
        for sha, wheel in self._wheels.items():
            if not (place / "wheels" / sha).exists():
                (place / "wheels" / sha).symlink_to(_unpacked(sha, wheel))


def _shared() -> Path:
    folder = Path(os.environ["QUANTKIT_TESTS_SHARED"]) / "devices"
    folder.mkdir(exist_ok=True)
    return folder


def _unpacked(sha: str, wheel: Path) -> Path:
    """Unpack a wheel once for all workers."""
    folder = _shared() / sha
    if not folder.exists():
        fresh = Path(tempfile.mkdtemp(dir=_shared()))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh, [name for name in archive.namelist() if "/tests/" not in name])
        limits = fresh / "quantkit/measurement/operators/ceilings.py"
        if limits.exists():
            text = limits.read_text(encoding="utf-8")
            assert text.count(_RUNS) == 1
            limits.write_text(text.replace(_RUNS, "runs: int = 2"), encoding="utf-8")
        try:
            fresh.rename(folder)
        except OSError:
            assert folder.exists()  # another worker was first
    return folder


@functools.cache
def _own_wheel() -> tuple[str, Path]:
    own = wheels.own_wheel(_shared())
    return hashlib.sha256(own.read_bytes()).hexdigest(), own


@functools.cache
def _probed(python: str, begin: tuple[str, ...]) -> Probed:
    return probe(OpenSSH(Address("here"), name="here", begin=begin, python=python), "/tmp")


def local(
    workdir: Path,
    name: str = "local",
    *,
    absent: Sequence[str] = (),
    link: Callable[..., Link] = Near,
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
    brought = dict([_own_wheel()])
    if absent:
        wheel = _shared() / f"{os.getpid()}-{'-'.join(absent)}.whl"
        with zipfile.ZipFile(wheel, "w") as made:
            for package in absent:
                made.writestr(f"{package}.py", f"raise ModuleNotFoundError({package!r}, name={package!r})\n")
        brought = {hashlib.sha256(wheel.read_bytes()).hexdigest(): wheel, **brought}
    device = NamedDevice(name=name, address="ssh://here", workdir=str(workdir))
    found = _probed(python, tuple(begin)).model_copy(update=about)
    return Reached(device, found, link(shell, str(workdir), wheels=brought, patience=30.0))


class Cut(Near):
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
