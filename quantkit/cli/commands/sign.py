"""`quantkit sign`: sign a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quantkit
from quantkit.cli.answer import Answer
from quantkit.cli.options import BundlePath, Json
from quantkit.errors import GateError, InputError


def sign(
    bundle: BundlePath,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key: SSH, or an elliptic curve in PEM.")
    ] = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign with a Sigstore identity instead; opens a browser.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Sign a finished bundle: quantkit sign BUNDLE --key ~/.ssh/id_ed25519."""
    from rich.text import Text

    from quantkit.bundle import seal

    if sigstore == (key is not None):
        value = "--key and --sigstore" if sigstore else "neither --key nor --sigstore"
        raise InputError("usage", "sign", value, "give exactly one of the two", "--key FILE, or --sigstore")
    opened = quantkit.load(bundle)
    failed = next((check for check in opened.verify() if not check.ok), None)
    if failed is not None:
        raise GateError("verify-failed", failed.where, failed.name, "only an intact bundle is signed")
    signature = seal.sign(opened.path, key)
    digest = seal.hash_of(opened.path)
    shown = [Text(f"signed: {signature}"), Text(f"  seal {digest}", no_wrap=True)]
    return Answer({"bundle": str(opened.path), "signature": signature.name, "seal": digest}, list(shown))
