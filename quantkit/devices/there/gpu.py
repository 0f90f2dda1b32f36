"""An engine on this device's GPU, beside the model that it was made from: in bfloat16, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.devices import job as jobs
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.timing.clocks import Clocks, of_gpu
from quantkit.measurement.timing.latency import TimedSide
from quantkit.runtimes import load_runtime
from quantkit.runtimes.torch import RUNTIME as TORCH


class EngineTimes:
    """What `times.measure` asks of the two; nothing is loaded before it does. Raises as `Runtime.open`."""

    def __init__(self, work: jobs.Measure, workdir: Path) -> None:
        self._work, self._workdir = work, workdir
        self._model: Any = load_runtime(work.runtime).open(workdir / work.ours.place, built=work.ours.built)

    def sides(self) -> tuple[list[TimedSide], dict[str, Any]]:
        """Both, loaded, and settings of their rows. Raises InputError `out-of-memory`."""
        from quantkit.measurement.timing import cuda

        work = self._work
        return cuda.engine_sides(
            self._model,
            TORCH.stream(self._workdir / work.theirs.place).source,
            form=work.ours.format,
            saved=work.ours.saved_bytes,
            subjects=(work.ours.subject, work.theirs.subject),
            device=self._device(),
        )

    def ceilings(self) -> Sequence[Ceiling]:
        """Of the GPU."""
        import numpy as np

        from quantkit.measurement.timing import cuda

        return cuda.ceilings(self._device(), np.random.default_rng(self._work.seed))

    def clocks(self) -> Clocks:
        """Of the GPU, now."""
        return of_gpu()

    def _device(self) -> Any:
        from quantkit.measurement.cuda.device import GpuDevice

        at = self._model.engine.device.type
        return GpuDevice(at, dry=at == "cpu")
