"""What a device says of itself: a stranger's data, closed and limited, and what is demanded of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from quantkit import machine, plugins
from quantkit.content import Closed, validated
from quantkit.devices.answers import Bytes, Finite, Name
from quantkit.devices.openssh import OpenSSH, held
from quantkit.errors import InputError
from quantkit.kernels import GPUS, too_old
from quantkit.runtimes import load_runtime

# what `devices.there` imports; `quantkit`'s own metadata says how recent each has to be
NEEDED = ("numpy", "onnxruntime", "pydantic", "pyyaml")
# seconds that its clock may be off: certificates and the dates in rows hold
_OFF = 86_400.0
# a runtime that lays weights out anew holds them twice while it loads them: as `timing.speed.demand_room` there has it
_TWICE = 2.2


class Gpu(Closed):
    """A GPU there; `memory` is 0 where it is the machine's."""

    name: Name
    sm: Name
    memory: Bytes
    driver: Name


class Probed(Closed):
    """What a device is.

    Args:
        model: of the board, where its firmware says it.
        isa: best first, as `quantkit doctor` names them.
        memory: bytes that a process may use there.
        disk_free: bytes, where the workdir is or will be.
        libc: `glibc-2.36`; `-` of others.
        packages: of its Python -> version.
        cuda: that its torch is built for; empty where torch is not there, or is built for none.
        triton: whether its Python has that.
        governor: of the clock of its first core.
        temperature: of the hottest zone, degrees Celsius.
        off: seconds that its clock is ahead of ours.
        busy: who has it, and for what; empty where nobody does.
    """

    host: Name
    system: Name
    release: Name
    machine: Name
    model: Name
    processor: Name
    isa: Annotated[list[Name], Field(min_length=1, max_length=50)]
    cores: Annotated[int, Field(ge=1, le=1 << 16)]
    memory: Bytes
    memory_free: Bytes
    last_level_cache: Bytes | None
    disk_free: Bytes
    python: Annotated[str, Field(pattern=r"^3\.\d{1,3}\.[0-9A-Za-z.+]{1,20}$")]
    implementation: Name
    # the second part is counted down to find wheels
    libc: Annotated[str, Field(pattern=r"^[a-z]*-(\d{1,2}(\.\d{1,2}){1,3})?$", max_length=40)]
    bits: Annotated[int, Field(ge=1, le=128)]
    packages: Annotated[dict[Name, Name], Field(max_length=100)]
    gpus: Annotated[list[Gpu], Field(max_length=64)]
    cuda: Name = ""
    triton: bool = False
    governor: Name
    temperature: Finite | None
    off: Finite
    busy: Name

    def demand(self, where: str) -> None:
        """Refuse what no job can run on. Raises InputError `wrong-python`, `clock-off`."""
        if self.implementation != "CPython" or self.bits != 64:
            value = f"{self.implementation} {self.python}, {self.bits} bits"
            rule = "wheels are of CPython, in 64 bits"
            raise InputError("wrong-python", where=where, value=value, rule=rule, remedy="name one: --python PATH")
        if abs(self.off) > _OFF:
            raise InputError(
                "clock-off",
                where=where,
                value=f"its clock is {abs(self.off) / 86_400:,.0f} days {'ahead' if self.off > 0 else 'behind'}",
                rule="times and certificates need a clock that is right to a day",
                remedy="set it there: sudo timedatectl set-ntp true, or sudo date -s",
            )

    def demand_memory(self, models: Iterable[Path], where: str, running: float = 0.0) -> None:
        """Refuse models that do not fit together, before anything is carried there.

        Args:
            models: files of weights, all of them loaded at once.
            running: bytes besides, while they run.

        Raises:
            InputError: `out-of-memory`.
        """
        need, free = _TWICE * sum(path.stat().st_size for path in models) + running, self.memory_free
        if need > free:
            raise InputError(
                "out-of-memory",
                where=where,
                value=f"the models take about {need / 1e9:.1f} GB there",
                rule=f"{free / 1e9:.1f} GB of its {self.memory / 1e9:.1f} are free",
                remedy="a smaller model or fewer bits, or another device",
            )

    def demand_room(self, memory: float, disk: float, what: str, where: str) -> None:
        """Refuse what does not fit, before anything is carried there.

        Args:
            memory: bytes that are held at once.
            disk: bytes of files.
            what: that takes them.

        Raises:
            InputError: `out-of-memory`, `device-full`.
        """
        if memory > self.memory_free:
            raise InputError(
                "out-of-memory",
                where=where,
                value=f"{what} take about {memory / 1e9:.1f} GB there",
                rule=f"{self.memory_free / 1e9:.1f} GB of its {self.memory / 1e9:.1f} are free",
                remedy="smaller shapes (--shape KxN), or another device",
            )
        if disk > self.disk_free:
            raise InputError(
                "device-full",
                where=where,
                value=f"{what} are {disk / 1e6:,.0f} MB of files, {self.disk_free / 1e6:,.0f} are free",
                rule="what is timed lies on its disk",
                remedy="fewer shapes or formats, or make room there",
            )

    def why_no_kernels(self) -> str:
        """Why quantkit's own kernels do not run on its GPU; empty where they do."""
        if not self.gpus:
            return "it has no NVIDIA GPU"
        if too_old(self.gpus[0].sm):
            return f"it is of SM {self.gpus[0].sm}: {GPUS}"
        if not self.cuda:
            return f"its torch ({self.packages.get('torch', 'none')}) is built without CUDA"
        return "" if self.triton else "its Python has no triton, which compiles the kernels there"

    def demand_gpu(self, need: float, where: str, what: str = "engine") -> None:
        """Refuse what does not fit into the memory of its GPU; one that has none of its own takes the machine's.

        Args:
            need: bytes that are held at once.
            what: is held beside the float model.

        Raises:
            InputError: `gpu-absent`, `out-of-memory`.
        """
        if not self.gpus:
            rule, remedy = "an engine runs on the GPU that it was built for", "another device, or --runtime torch"
            raise InputError("gpu-absent", where=where, value="no NVIDIA GPU", rule=rule, remedy=remedy)
        gpu = self.gpus[0]
        if gpu.memory and need > gpu.memory:
            raise InputError(
                "out-of-memory",
                where=where,
                value=f"the {what} and the float model take about {need / 1e9:.1f} GB of its GPU",
                rule=f"{gpu.name} has {gpu.memory / 1e9:.1f} GB",
                remedy="--no-speed, which does without the float model there, or another device",
            )

    def demand_own(self, packages: Iterable[str], where: str, rule: str) -> None:
        """Refuse packages that are not there and are not carried. Raises InputError `runtime-not-here`."""
        have = {name.lower() for name in self.packages}
        missing = [name for name in packages if name not in have]
        if missing:
            raise lacking(missing, where, rule)

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has."""
        return self.model_dump(mode="json")


def lacking(packages: Sequence[str], where: str, rule: str) -> InputError:
    """The refusal of a device that has not installed what is not carried: `["torch>=2.9"]`."""
    return InputError(
        "runtime-not-here",
        where=where,
        value=f"its Python has no {' and no '.join(packages)}",
        rule=rule,
        remedy=f"install {' and '.join(packages)} there, or name the Python that has them: --python PATH",
    )


def _looked_for() -> list[str]:
    """Packages that a device may have: those that rows name, and whatever would be carried there otherwise."""
    runtimes = [load_runtime(name) for name in plugins.RUNTIMES.shipped()]
    needed = {package for each in runtimes for package in (*each.packages, *each.installed)}
    return sorted({*machine.PACKAGES, *NEEDED, *needed})


def probe(shell: OpenSSH, workdir: str) -> Probed:
    """What the device is now.

    Raises:
        InputError: it is not reached, or its answer is none.
        Stopped: the connection broke.
    """
    asked = {"machine": Path(machine.__file__).read_text(encoding="utf-8"), "workdir": workdir}
    found = shell.call("probe", {**asked, "packages": _looked_for()}, seconds=60.0)
    there = found.pop("time", None)
    off = there - time.time() if isinstance(there, float) else None
    busy = found.get("busy")
    if busy:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            busy = json.loads(busy)
        busy = held(busy)
    told = {**found, "off": off, "busy": busy}
    return validated(Probed, told, where=shell.name, code="answer-invalid", rule="what a device says")
