"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.errors import InputError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Shipped name, folder (./folder), hf:org/name, or a .gguf or .onnx file.")
]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of a bundle.", show_default=False)]
Target = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="Shipped target or a file; default: this processor.")
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH", help="Shipped set or a path (.txt, .jsonl, .csv, .parquet, folder); default: the recipe's."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="DIR", help="LoRA or DoRA adapter of PEFT to merge first; several in order."),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=YAML", help="Change the recipe: scheme.weights.group=32.")
]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Allow the recipe to run Python files (./my_pass.py).")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Allow the model's own code to run.")]
Runtime = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Runtime; default: onnxruntime if the bundle has a graph, else torch."),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="DEVICE", help="Device of `quantkit device list`, or ssh://USER@HOST.", show_default=False
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option("--on", metavar="ray://HOST:PORT", help="Ray cluster to compile on; `ray`: this machine's own."),
]
Wheelhouse = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="With --on: local folder of wheels; default: the device's, or pip's index."),
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page with the figures.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, even on failure.")]


def demand_device(on: str | None, wheelhouse: Path | None) -> None:
    """Refuse wheels without a device. Raises InputError `usage`."""
    if wheelhouse is not None and on is None:
        raise InputError("usage", "--wheelhouse", "no --on", "a wheelhouse is for a device")


def listed(text: str | None) -> list[str]:
    """Split an option at its commas; an absent option gives an empty list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def batches(text: str | None, where: str = "--batch") -> list[int] | None:
    """Parse `--batch`: `1,2,4` as numbers. Raises InputError `usage`."""
    if text is None:
        return None
    parts = listed(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError("usage", where, text, "positive numbers, separated by commas: 1,2,4")
    return [int(part) for part in parts]
