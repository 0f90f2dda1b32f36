"""A device that is ready for jobs: found, probed, refused where it cannot, and with what it needs installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.devices import wheels
from quantkit.devices.link import Link
from quantkit.devices.named import NamedDevice, find
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import Probed, probe
from quantkit.errors import InputError
from quantkit.runtimes import load_runtime
from quantkit.runtimes.child import Report

_TURNS = "turns there are those of ONNX Runtime, OpenVINO and llama.cpp"


@dataclass(frozen=True)
class Reached:
    """A device at hand.

    Args:
        device: as the user knows it.
        about: what it is now.
        link: the way there.
    """

    device: NamedDevice
    about: Probed
    link: Link

    def prepare(self, models: Iterable[Path], running: float = 0.0, progress: Report | None = None) -> None:
        """Refuse models that do not fit, and carry what runs there: before anything else is carried.

        Args:
            models: files of weights, all loaded at once.
            running: bytes besides, while they run.

        Raises:
            InputError: `out-of-memory`; those of `Link.install`.
        """
        self.about.demand_memory(models, self.device.name, running)
        self.link.install(progress)


@contextmanager
def reach(on: str | NamedDevice, *, wheelhouse: Path | None = None, runtimes: Iterable[str] = ()) -> Iterator[Reached]:
    """The device of a name or an address, until the body ends.

    Args:
        on: a name, `ssh://…`, or a device.
        wheelhouse: instead of the device's own.
        runtimes: that run there: what they need is carried too, unless it is there.

    Raises:
        InputError: `runtime-not-here`, something is missing that is not carried; there is no such device, OpenSSH does
            not get there, or nothing can run on it; `file-missing`, no such wheelhouse.
        Stopped: `device-gone`.
    """
    device = find(on) if isinstance(on, str) else on
    used = [load_runtime(each) for each in dict.fromkeys(runtimes)]
    house = wheelhouse or (Path(device.wheelhouse).expanduser() if device.wheelhouse else None)
    if house is not None and not house.is_dir():
        rule, remedy = "a wheelhouse is a folder of wheels", "pip download -d FOLDER, or leave out --wheelhouse"
        raise InputError("file-missing", where="--wheelhouse", value=f"no folder {house}", rule=rule, remedy=remedy)
    with shell(device) as way:
        about = probe(way, device.workdir)
        about.demand(device.name)
        installed = wheels.installed(about, [package for each in used for package in each.installed], device.name)
        more = [package for each in used for package in each.packages]
        brought = wheels.needed(about, wheelhouse=house, where=device.name, more=more, installed=installed)
        yield Reached(device, about, Link(way, device.workdir, wheels=brought))


def demand_sessions(runtimes: Iterable[str], *, text: bool = False) -> None:
    """Refuse what is timed in turns there in a runtime whose models are no sessions, or goes on token by token in an
    engine.

    Args:
        text: whether it is that.

    Raises:
        InputError: `runtime-unsupported`.
    """
    for each in runtimes:
        runner = load_runtime(each)
        if runner.engines if text else runner.floats is None:
            what = "text there is that of ONNX Runtime, OpenVINO, llama.cpp and torch" if text else _TURNS
            rule = f"{what}; {each} is for `measure` there"
            remedy = "--runtime onnxruntime, or work on the device itself"
            raise InputError("runtime-unsupported", where="--on, --runtime", value=each, rule=rule, remedy=remedy)


def shell(device: NamedDevice) -> OpenSSH:
    """The way to a device, without asking anything of it."""
    return OpenSSH(Address.read(device.address), name=device.name, python=device.python)
