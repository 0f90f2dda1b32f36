"""What is compiled, behind one interface: a transformer in blocks, or a float graph in products.

A `Subject` is opened and found good, with nothing written; its `Work` is what is done to it in a build. `compile.py`
alone knows the order of their methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Engines:
    """What was compiled from checked exports.

    Args:
        hashes: of its files, by path in the bundle.
        decisions: what a reader has to know of it.
        checks: that engines do what was asked.
    """

    hashes: Mapping[str, str] = field(default_factory=dict)
    decisions: Sequence[Decision] = ()
    checks: Sequence[Check] = ()


@dataclass(frozen=True)
class Scores:
    """What scoring has found.

    Args:
        rows: accuracy and size.
        checks: that confirm the scores from outside.
        decisions: what was not confirmed, or not run, each with its reason.
    """

    rows: list[Row]
    checks: Sequence[Check] = ()
    decisions: Sequence[Decision] = ()


class Work(Protocol):
    """The steps of one compile, in a build; what takes long is committed, so that a resume does not do it again.

    A step that not every compile has (`prove`, `quantize`, `build`, `speed`) begins its own stage.

    Attributes:
        layers: what was quantized; known after `solve`.
        quantize_cpu: processor seconds from calibration to packed weights; known after `export`.
    """

    @property
    def layers(self) -> list[LayerEntry]: ...  # noqa: D102

    quantize_cpu: float

    def prove(self) -> list[Check]:
        """Hold what calibrates and scores against the model itself. Raises InputError `stream-differs`."""

    def solve(self) -> list[Decision]:
        """Choose all codes, each unit (a block, a product) committed before the next."""

    def export(self) -> list[Decision]:
        """Write every export of the recipe into the bundle."""

    def check(self) -> tuple[list[Check], list[Decision]]:
        """Load every export again in its runtime. Raises GateError `check-failed`."""

    def engines(self) -> Engines:
        """Compile the checked exports that engines are built from, and look into them where this machine can."""

    def score(self, bundle: Bundle, engines: Mapping[str, str]) -> Scores:
        """Accuracy and size against the original.

        Args:
            bundle: as it was just written.
            engines: hashes of what was compiled, by path in the bundle.
        """

    def time(self, bundle: Bundle) -> tuple[list[Row], list[Decision]]:
        """Speed against the original, and why it was not measured."""

    def weights(self, decisions: Sequence[Decision]) -> list[WeightsEntry]:
        """Every tensor of the source accounted for; empty where a graph's own constants are all there is."""


class Subject(Protocol):
    """A model that was opened; everything that can be refused has been.

    Attributes:
        request: as it is compiled: what a target adds or leaves out is in its recipe.
        out: the bundle's place.
        decisions: taken so far.
        notes: what is to be known of the source.
        expected: what the compile will take of memory and disk.
        stages: in order, with the number of parts that each has.
        device: where it computes.
    """

    request: Request
    out: Path
    decisions: list[Decision]
    notes: Sequence[str]
    device: ComputeDevice

    @property
    def expected(self) -> Compiling: ...  # noqa: D102

    @property
    def stages(self) -> Mapping[str, float]: ...  # noqa: D102

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the bundle's content depends on."""

    def demand_unchanged(self) -> None:
        """Hold the source against the hash that the manifest names. Raises InputError `source-changed`."""

    def entries(self) -> tuple[ModelEntry, CalibrationEntry | None]:
        """The model, and what it is calibrated on, as a manifest lists them."""

    def planned(self) -> dict[str, Any]:
        """What the compile would do, as JSON."""

    def work(self, build: Build, progress: Progress, stages: Stages) -> Work:
        """The work on it, in a build."""
