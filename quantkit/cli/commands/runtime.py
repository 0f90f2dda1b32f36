"""`quantkit runtime`: runtimes with a Python of their own, one function a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json
from quantkit.errors import InputError

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the runtime: vllm.", show_default=False)]


def add(
    name: Name,
    install: Annotated[
        bool, typer.Option("--install", help="Make a Python for it in your data folder: about 2 GB.")
    ] = False,
    python: Annotated[Path | None, typer.Option(metavar="PATH", help="A Python that has it.")] = None,
    as_json: Json = False,
) -> Answer:
    """Add a runtime in a Python of its own: quantkit runtime add vllm --install."""
    from rich.text import Text

    from quantkit.runtimes import apart

    own = apart.asked(name)
    if install == (python is not None):
        value = "neither is given" if python is None else "both are given"
        remedy = f"quantkit runtime add {name} --install"
        raise InputError("usage", "--install, --python", value, "give exactly one of the two", remedy)
    with showing() as progress:
        progress.begin(f"adding {name}")
        if python is not None:
            place = apart.add(own, python)
        else:
            place = apart.install(own, lambda share, words: progress.at("install", share, words))
    return Answer(asdict(place), [Text(_line(place.name, place.python, place.versions))])


def list_(as_json: Json = False) -> Answer:
    """List these runtimes, and the Python of each."""
    from rich.text import Text

    from quantkit.runtimes import apart

    places = {name: apart.find(name) for name in apart.known()}
    lines = [
        Text(
            _line(name, place.python, place.versions)
            if place
            else f"{name}: not added; quantkit runtime add {name} --install"
        )
        for name, place in places.items()
    ]
    absent: dict[str, Any] = {"python": None, "versions": {}, "installed": False}
    known = [{"name": name, **(asdict(place) if place else absent)} for name, place in places.items()]
    return Answer({"runtimes": known}, lines)


def remove(name: Name, as_json: Json = False) -> Answer:
    """Forget a runtime's Python; an installed one is deleted."""
    from rich.text import Text

    from quantkit.runtimes import apart

    place = apart.remove(apart.asked(name).name)
    line = f"{name} was not added"
    if place is not None:
        line = (
            f"deleted {Path(place.python).parents[1]}"
            if place.installed
            else f"forgot {place.python}; it is still there"
        )
    return Answer(
        {"removed": None if place is None else place.python, "deleted": bool(place and place.installed)}, [Text(line)]
    )


def _line(name: str, python: str, versions: object) -> str:
    listed = ", ".join(f"{package} {version}" for package, version in dict(versions).items())  # type: ignore[call-overload]
    return f"{name}: {python} ({listed})"


HELP = "Manage runtimes that need a Python of their own."
# in the order of the help
COMMANDS: tuple[Callable[..., Answer], ...] = (add, list_, remove)
