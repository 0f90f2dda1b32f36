"""Interface of a compile's subject: a transformer in blocks, or a float graph in products.

`compile.py` alone knows the order of the steps. A step adds its decisions and checks to those of the subject, and
commits its slow work for a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import (
    Build,
    Bundle,
    CalibrationEntry,
    Check,
    Decision,
    LayerEntry,
    ModelEntry,
    WeightsEntry,
)
from quantkit.measurement.rows import Row
from quantkit.model.device import ComputeDevice
from quantkit.pipeline.progress import Progress, Stages
from quantkit.pipeline.request import Request
from quantkit.planning.compiling import Compiling


def fingerprint(request: Request, packages: Sequence[str], **own: Any) -> dict[str, Any]:
    """Return all inputs of a bundle's content.

    Args:
        packages: packages with an effect on it.
        own: additions of a kind of model.
    """
    import torch

    from quantkit.kernels.cpu import columns

    versions = machine.versions()
    return {
        "quantkit": __version__,
        "recipe": request.recipe.as_dict(),
        "code": request.recipe.outside(),
        "threads": torch.get_num_threads(),
        "isa": machine.isa(),
        "solvers": columns.language(),
        "versions": {name: versions[name] for name in packages if name in versions},
        **own,
    }


class Subject(ABC):
    """An opened and checked model, with the state of its compile.

    Attributes:
        request: request to carry out, with the exports that the target adds or drops.
        notes: notes about the source for the reader.
        decisions, checks: those of the steps so far.
        engines: path in the bundle -> hash of an engine that was compiled from the exports.
        quantize_cpu: processor seconds from calibration to packed weights; known after `export`.
    """

    build: Build
    progress: Progress
    watch: Stages

    def __init__(self, request: Request, out: Path, decisions: list[Decision], notes: Sequence[str]) -> None:
        self.request, self.out, self.decisions, self.notes = request, out, decisions, notes
        self.device = ComputeDevice()
        self.checks: list[Check] = []
        self.layers: list[LayerEntry] = []
        self.engines: Mapping[str, str] = {}
        self.quantize_cpu = 0.0

    def begin(self, build: Build, progress: Progress, watch: Stages) -> None:
        """Start the work in a build; steps that not every compile has begin their own stage of the watch."""
        self.build, self.progress, self.watch = build, progress, watch

    def planned(self) -> dict[str, Any]:
        """Return the planned compile as JSON: sizes in bytes; time is known after the first block."""
        asked = self.request.recipe.as_dict()
        return {
            **self.described(),
            "notes": list(self.notes),
            "recipe": self.request.recipe.name,
            "target": self.request.target.name,
            "passes": asked["passes"],
            "export": asked["export"],
            "seconds": None,
            "memory_bytes": round(self.expected.peak),
            "disk_bytes": self.expected.as_dict()["disk_bytes"],
            "out": str(self.out),
            "decisions": [decision.as_dict() for decision in self.decisions],
        }

    @property
    @abstractmethod
    def expected(self) -> Compiling:
        """Expected memory and disk of the compile."""

    @property
    @abstractmethod
    def stages(self) -> Mapping[str, float]:
        """Stages in their order, with the number of parts of each."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return all inputs of the bundle's content."""

    @abstractmethod
    def demand_unchanged(self) -> None:
        """Hold the source against the hash that the manifest names. Raises InputError `source-changed`."""

    @abstractmethod
    def entries(self) -> tuple[ModelEntry, CalibrationEntry | None]:
        """Return the model and its calibration set, as a manifest lists them."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return model, schemes and sets for `planned`."""

    def prove(self) -> None:  # noqa: B027
        """Compare calibration and scores with the model itself. Raises InputError `stream-differs`."""

    @abstractmethod
    def solve(self) -> None:
        """Choose all codes, each unit (a block, a product) committed before the next."""

    def assist(self) -> None:
        """Do this rank's share of `solve`, where another one commits."""
        raise AssertionError("this subject is compiled by one process")

    @abstractmethod
    def export(self) -> None:
        """Write every export of the recipe into the bundle."""

    @abstractmethod
    def check(self) -> None:
        """Load every export again in its runtime. Raises GateError `check-failed`."""

    @abstractmethod
    def compile_engines(self) -> None:
        """Compile the checked exports for engines, and inspect them if this machine can."""

    @abstractmethod
    def score(self, bundle: Bundle) -> list[Row]:
        """Measure accuracy and size against the original. Raises GateError `check-failed`."""

    @abstractmethod
    def time(self, bundle: Bundle) -> list[Row]:
        """Measure speed against the original; what prevents it is a decision."""

    @abstractmethod
    def weights(self) -> list[WeightsEntry]:
        """Account for every tensor of the source."""
