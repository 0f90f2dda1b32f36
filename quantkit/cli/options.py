"""The options that more than one command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.errors import InputError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="An alias, a folder (./folder), hf:org/name, or a .gguf or .onnx file.")
]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The folder of a bundle.", show_default=False)]
Target = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="A shipped target or a path; default: this processor.")
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH", help="A shipped set or a path (.txt, .jsonl, .parquet, folder); default: the recipe's."
    ),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=YAML", help="Change the recipe: scheme.weights.group=32.")
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run the files that the recipe's passes name (./my_pass.py).")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")]
Runtime = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What runs it; default: onnxruntime where the bundle has a graph, else torch."),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="DEVICE", help="A device of `quantkit device list`, or ssh://USER@HOST.", show_default=False
    ),
]
Wheelhouse = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="With --on: a folder with wheels for the device; default: its own, or pip's index."
    ),
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the figures.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, on failure too.")]


def demand_device(on: str | None, wheelhouse: Path | None) -> None:
    """Refuse wheels for no device. Raises InputError `usage`."""
    if wheelhouse is not None and on is None:
        raise InputError("usage", "--wheelhouse", "no --on", "it holds wheels for a device")


def listed(text: str | None) -> list[str]:
    """The parts of an option, with commas between; none where it is not given."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def batches(text: str | None, where: str = "--batch") -> list[int] | None:
    """What `--batch` says: `1,2,4` as numbers. Raises InputError."""
    if text is None:
        return None
    parts = listed(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError("usage", where, text, "numbers from 1 up, with commas: 1,2,4")
    return [int(part) for part in parts]
