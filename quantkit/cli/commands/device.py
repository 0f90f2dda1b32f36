"""`quantkit device`: machines to measure on, one function a command."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.devices.named import NamedDevice

_ANY = "A name of `quantkit device list`, or ssh://USER@HOST."
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the device.", show_default=False)]
Device = Annotated[str, typer.Argument(metavar="DEVICE", help=_ANY, show_default=False)]


def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name for the device: pi5.", show_default=False)],
    address: Annotated[
        str, typer.Argument(metavar="ssh://USER@HOST", help="Its address for OpenSSH.", show_default=False)
    ],
    workdir: Annotated[
        str, typer.Option(metavar="PATH", help="A folder of quantkit's own on the device: an absolute path or ~/...")
    ] = "~/quantkit",
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python there, 3.11 or later; default: the first in its PATH.")
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Local folder of wheels for the device; default: pip's index.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a device of that name.")] = False,
    as_json: Json = False,
) -> Answer:
    """Probe a machine and save it: quantkit device add pi5 ssh://pi@raspberrypi.local."""
    from quantkit.content import validated
    from quantkit.devices import named
    from quantkit.devices.openssh import Address, as_workdir

    named.demand_name(name)
    aimed = str(Address.read(address))
    known = named.find(name).address if name in named.names() and not force else aimed
    if known != aimed:
        rule = "a name stands for one device; rows in bundles refer to it"
        remedy = f"another name, --force, or quantkit device remove {name}"
        raise InputError("device-exists", name, f"it is {known}", rule, remedy)
    fields: dict[str, Any] = {"name": name, "address": aimed, "workdir": as_workdir(workdir)}
    fields |= {"python": python, "wheelhouse": str(wheelhouse.absolute()) if wheelhouse else None}
    answer = _probed(validated(named.NamedDevice, fields, where=name, code="device-invalid"))
    if force:
        named.target_path(name).unlink(missing_ok=True)  # the replaced device's
    return answer


def list_(as_json: Json = False) -> Answer:
    """List your devices."""
    from quantkit.devices import named
    from quantkit.report import terminal

    devices = [named.find(name).model_dump(mode="json") for name in named.names()]
    return Answer({"devices": devices}, terminal.listed(devices))


def show(name: Name, as_json: Json = False) -> Answer:
    """Show a device, as of its last probe."""
    from quantkit.devices import named
    from quantkit.report import terminal

    device = named.find(name, where="NAME").model_dump(mode="json")
    return Answer(device, terminal.device(device))


def probe(device: Device, as_json: Json = False) -> Answer:
    """Probe a device again."""
    from quantkit.devices import named

    return _probed(named.find(device, where="DEVICE"), keep=device in named.names())


def doctor(
    device: Device,
    write: Annotated[bool, typer.Option("--write", help="Save a target with the measured figures.")] = False,
    as_json: Json = False,
) -> Answer:
    """Measure a device's limits; with --write, save them as a target."""
    from quantkit.cli.commands.doctor import on_device

    return on_device(device, write=write)


def clean(device: Device, as_json: Json = False) -> Answer:
    """Remove all carried bundles and packages from a device."""
    from rich.text import Text

    from quantkit.devices import named
    from quantkit.devices.asked import clean as remove_there
    from quantkit.report.kit import words

    known = named.find(device, where="DEVICE")
    with showing() as progress:
        progress.begin(f"cleaning {known.name}")
        removed = remove_there(known)
    what = f"{words.plural(removed.bundles, 'bundle')} and {words.plural(removed.wheels, 'package')}"
    return Answer(removed.model_dump(mode="json"), [Text(f"removed {what}: {words.size(removed.bytes)}")])


def remove(name: Name, as_json: Json = False) -> Answer:
    """Forget a device; its files stay there."""
    from rich.text import Text

    from quantkit.devices import named

    device = named.find(name, where="NAME")
    device.remove()
    left = f"its files stay in {device.workdir} there"
    return Answer({"removed": name, "address": device.address, "workdir": device.workdir}, [Text(left)])


def _probed(device: NamedDevice, *, keep: bool = True) -> Answer:
    """Probe a device, refuse one without a usable Python, and save the rest."""
    from quantkit.devices.named import shell
    from quantkit.devices.probed import probe as ask
    from quantkit.report import terminal

    with showing() as progress, shell(device) as way:
        progress.begin(f"probing {device.name}")
        about = ask(way, device.workdir)
    about.demand(device.name)
    known = device.model_copy(update={"about": about, "probed": datetime.now(UTC).date()})
    if keep:
        known.save()
    shown = known.model_dump(mode="json")
    return Answer(shown, terminal.device(shown))


HELP = "Manage machines to measure on, reached by OpenSSH."
# in the order of the help
COMMANDS: tuple[Callable[..., Answer], ...] = (add, list_, show, probe, doctor, clean, remove)
