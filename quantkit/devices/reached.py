"""A device that is ready for jobs: found, probed, refused where it cannot, and with what it needs installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.devices import wheels
from quantkit.devices.asked.room import Ready
from quantkit.devices.link import carry
from quantkit.devices.named import NamedDevice, find
from quantkit.devices.probed import Probed, probe
from quantkit.devices.ssh.address import Address
from quantkit.devices.ssh.link import SSHLink
from quantkit.devices.ssh.openssh import OpenSSH
from quantkit.errors import InputError
from quantkit.pipeline.progress import Progress
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
    link: SSHLink

    def carry(self, name: str, files: Mapping[str, Path], progress: Report | None = None) -> str:
        """A folder of files there, relative path -> file here; its `Place`. Raises as `Link.put`."""
        return carry(self.link, name, files, progress)

    def ready(self, progress: Progress | None = None) -> Ready:
        """What is called with the files of all models before they are carried: refuses those that do not fit, and
        carries what runs there. Raises as `Probed.demand_memory` and `install`."""

        def demand(models: Iterable[Path], running: float = 0.0) -> None:
            self.about.demand_memory(models, self.device.name, running)
            self.install(lambda share, words: progress.at("carrying", share, words) if progress else None)

        return demand

    def install(self, progress: Report | None = None) -> None:
        """Carry what runs there, unless it is there: after all that can be refused has been. Raises as `Link.put`."""
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
        yield Reached(device, about, SSHLink(way, device.workdir, wheels=brought))


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
