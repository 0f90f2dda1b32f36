"""`quantkit device`: the machines that things are measured on, a command a function."""

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
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the device.", show_default=False)]
Device = Annotated[str, typer.Argument(metavar="DEVICE", help=_ANY, show_default=False)]


def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is to be called: pi5.", show_default=False)],
    address: Annotated[
        str, typer.Argument(metavar="ssh://USER@HOST", help="As OpenSSH reaches it.", show_default=False)
    ],
    workdir: Annotated[
        str, typer.Option(metavar="PATH", help="A folder of its own on the device, from / or ~/ on.")
    ] = "~/quantkit",
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Its Python, 3.11 or later; default: the first in its PATH.")
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A folder here with wheels for it; default: pip's index.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Put it in the place of another one of that name.")] = False,
    as_json: Json = False,
) -> Answer:
    """Probe a machine and remember it: quantkit device add pi5 ssh://pi@raspberrypi.local."""
    from quantkit.content import validated
    from quantkit.devices import named
    from quantkit.devices.openssh import Address, as_workdir

    named.demand_name(name)
    aimed = str(Address.read(address))
    known = named.find(name).address if name in named.names() and not force else aimed
    if known != aimed:
        rule = "a name is one device's, as rows in bundles have it"
        remedy = f"another name, --force, or quantkit device remove {name}"
        raise InputError("device-exists", name, f"it is {known}", rule, remedy)
    said: dict[str, Any] = {"name": name, "address": aimed, "workdir": as_workdir(workdir)}
    said |= {"python": python, "wheelhouse": str(wheelhouse.absolute()) if wheelhouse else None}
    answer = _probed(validated(named.NamedDevice, said, where=name, code="device-invalid"))
    if force:
        named.target_path(name).unlink(missing_ok=True)  # of the other one
    return answer


def list_(as_json: Json = False) -> Answer:
    """The devices of this user."""
    from quantkit.devices import named
    from quantkit.report import terminal

    found = [named.find(name).model_dump(mode="json") for name in named.names()]
    return Answer({"devices": found}, terminal.listed(found))


def show(name: Name, as_json: Json = False) -> Answer:
    """What a device said when it was last probed."""
    from quantkit.devices import named
    from quantkit.report import terminal

    found = named.find(name, where="NAME").model_dump(mode="json")
    return Answer(found, terminal.device(found))


def probe(device: Device, as_json: Json = False) -> Answer:
    """Ask a device again what it is."""
    from quantkit.devices import named

    return _probed(named.find(device, where="DEVICE"), keep=device in named.names())


def doctor(
    device: Device,
    write: Annotated[bool, typer.Option("--write", help="Make a target of the measured figures.")] = False,
    as_json: Json = False,
) -> Answer:
    """Measure what a device can do at best; with --write, make a target of it."""
    from quantkit.cli.commands.doctor import on_device

    return on_device(device, write=write)


def clean(device: Device, as_json: Json = False) -> Answer:
    """Remove the bundles and packages that were carried to a device; what is needed is carried again."""
    from rich.text import Text

    from quantkit.devices import named
    from quantkit.devices.asked import clean as remove_there
    from quantkit.report.kit import words

    found = named.find(device, where="DEVICE")
    with showing() as progress:
        progress.begin(f"cleaning {found.name}")
        removed = remove_there(found)
    what = f"{words.plural(removed.bundles, 'bundle')} and {words.plural(removed.wheels, 'package')}"
    return Answer(removed.model_dump(mode="json"), [Text(f"removed {what}: {words.size(removed.bytes)}")])


def remove(name: Name, as_json: Json = False) -> Answer:
    """Forget a device. What lies there stays."""
    from rich.text import Text

    from quantkit.devices import named

    found = named.find(name, where="NAME")
    found.remove()
    left = f"its files stay in {found.workdir} there"
    return Answer({"removed": name, "address": found.address, "workdir": found.workdir}, [Text(left)])


def _probed(device: NamedDevice, *, keep: bool = True) -> Answer:
    """Ask it, refuse what nothing runs on, and remember the rest."""
    from quantkit.devices.named import shell
    from quantkit.devices.probed import probe as ask
    from quantkit.report import terminal

    with showing() as progress, shell(device) as way:
        progress.begin(f"probing {device.name}")
        about = ask(way, device.workdir)
    about.demand(device.name)
    found = device.model_copy(update={"about": about, "probed": datetime.now(UTC).date()})
    if keep:
        found.save()
    shown = found.model_dump(mode="json")
    return Answer(shown, terminal.device(shown))


HELP = "The machines that things are measured on, by OpenSSH."
# in the order in which help names them
COMMANDS: tuple[Callable[..., Answer], ...] = (add, list_, show, probe, doctor, clean, remove)
