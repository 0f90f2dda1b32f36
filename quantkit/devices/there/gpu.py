"""What this device's GPU runs, an engine or a checkpoint on quantkit's kernels, beside the model it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.devices import job as jobs
from quantkit.errors import InputError
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.timing.clocks import Clocks, of_gpu
from quantkit.measurement.timing.latency import LoadedSides
from quantkit.runtimes import load_runtime
from quantkit.runtimes.torch import RUNTIME as TORCH


class _GpuTimes:
    """What `times.measure` asks of two models; nothing is loaded before it does.

    Args:
        at: the torch device that both are on: `cuda`, or `cpu` for tests.
    """

    def __init__(self, work: jobs.Measure, workdir: Path, at: str) -> None:
        from quantkit.measurement.cuda.device import GpuDevice

        self._work, self._device = work, GpuDevice(at, dry=at == "cpu")
        self._place, self._theirs = workdir / work.ours.place, workdir / work.theirs.place

    @property
    def _how(self) -> dict[str, Any]:
        """What both kinds are told of the two."""
        ours, theirs = self._work.ours, self._work.theirs
        return {"form": ours.format, "subjects": (ours.subject, theirs.subject), "device": self._device}

    def ceilings(self) -> Sequence[Ceiling]:
        """Of the GPU."""
        import numpy as np

        from quantkit.measurement.cuda.ceilings import sampled
        from quantkit.measurement.timing import cuda

        return sampled(self._device, cuda.CEILING_BLOCKS, np.random.default_rng(self._work.seed))

    def clocks(self) -> Clocks:
        """Of the GPU, now."""
        return of_gpu()


class EngineTimes(_GpuTimes):
    """Of an engine. Raises as `Runtime.open`."""

    def __init__(self, work: jobs.Measure, workdir: Path) -> None:
        runner: Any = load_runtime(work.runtime)
        self._model = runner.open(workdir / work.ours.place, built=work.ours.built)
        super().__init__(work, workdir, self._model.engine.device.type)

    def sides(self) -> LoadedSides:
        """Both, loaded. Raises InputError `out-of-memory`."""
        from quantkit.measurement.timing import cuda

        source, saved = TORCH.stream(self._theirs).source, self._work.ours.saved_bytes
        return cuda.engine_sides(self._model, source, saved=saved, **self._how)


class KernelTimes(_GpuTimes):
    """Of a checkpoint on quantkit's own kernels. Raises InputError `device-absent`."""

    def __init__(self, work: jobs.Measure, workdir: Path) -> None:
        import torch

        from quantkit.kernels.launch import interpreted

        seen = torch.cuda.is_available()
        if not seen and not interpreted():
            raise InputError(
                "device-absent",
                where="torch",
                value="no GPU that torch sees",
                rule="quantkit's kernels are for NVIDIA GPUs",
                remedy="a driver that is as new as its torch, or --no-speed",
            )
        super().__init__(work, workdir, "cuda" if seen else "cpu")

    def sides(self) -> LoadedSides:
        """Both, loaded. Raises InputError `out-of-memory`, `dispatch-invalid`; MissingDependency: triton."""
        from quantkit.measurement.timing import cuda

        return cuda.kernel_sides(self._place, self._work.layers, TORCH.stream(self._theirs).source, **self._how)
