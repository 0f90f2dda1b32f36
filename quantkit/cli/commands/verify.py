"""`quantkit verify`: whether a bundle is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import quantkit
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import BundlePath, Json, On, TrustRemoteCode, Wheelhouse, demand_device
from quantkit.errors import GateError, InputError

if TYPE_CHECKING:
    from quantkit.bundle import Bundle, Check


def verify(
    bundle: BundlePath,
    layers: Annotated[
        Path | None,
        typer.Option(
            metavar="BUNDLE", help="Compare its TensorRT network with this float bundle's, layer by layer, instead."
        ),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="With --layers, what a graph is fed with.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --layers, tensorrt_rtx or tensorrt: an engine as well.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option(metavar="HASH", help="Of the seal, as it was announced; 16 digits at least.")
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option(metavar="FILE|IDENTITY", help="A public key (SSH, PEM), allowed_signers, or a Sigstore identity."),
    ] = None,
    issuer: Annotated[str | None, typer.Option(metavar="URL", help="Who vouches for a Sigstore identity.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    as_json: Json = False,
) -> Answer:
    """Check every file of a bundle, then load it again; here or on a device."""
    from quantkit.bundle import seal
    from quantkit.model.source import pretrained
    from quantkit.pipeline.reload import reload
    from quantkit.report import terminal

    demand_device(on, wheelhouse)
    opened = quantkit.load(bundle)
    if issuer is not None and signer is None:
        raise InputError("usage", "--issuer", "without --signer", "it vouches for a signer")
    if expect is not None:
        seal.demand(opened.path, expect)
    signed = None if signer is None else seal.demand_signer(opened.path, signer, issuer)
    for config in sorted(opened.path.glob("*/config.json")) if trust_remote_code else ():
        pretrained.trust(config.parent)
    if layers is not None and on is not None:
        raise InputError("usage", "--on", "with --layers", "layers are compared on this machine")
    if layers is not None:
        return _layers(opened, quantkit.load(layers), inputs, runtime)
    if inputs is not None or runtime is not None:
        said = "--inputs" if inputs is not None else "--runtime"
        raise InputError("usage", said, "without --layers", "it says how layers are compared")
    with showing() as progress:
        progress.begin(f"verifying {bundle}")
        if on is not None:
            from quantkit.devices.asked import verify_on
            from quantkit.devices.named import reach

            with reach(on, wheelhouse=wheelhouse) as device:
                found, notes = verify_on(opened, device, progress)
        else:
            found = opened.verify()
            whole = all(check.ok for check in found)
            reloaded, notes = reload(opened) if whole else ([], ["not loaded: files differ"])
            found = [*found, *reloaded]
    failed = next((check for check in found if not check.ok), None)
    error = None
    if failed is not None:
        error = GateError(
            "verify-failed",
            f"{on}: {failed.where}" if on is not None else failed.where or str(bundle),
            f"{failed.name} is {failed.value}",
            f"it is {failed.limit}" if failed.limit == 0 else f"at most {failed.limit}",
            "fetch or compile the bundle again" if on is None else _there(on, failed),
        )
    sealed = seal.hash_of(opened.path)
    seals = [f"seal           {sealed}", *([f"signed by      {signed}"] if signed else [])]
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "seal": sealed,
        "signed_by": signed,
        **({"device": on} if on is not None else {}),
        "checks": [{**check.model_dump(mode="json"), "where": check.where} for check in found],
    }
    return Answer(
        result, terminal.verified(opened.path, opened.manifest, found, notes, seals), warnings=notes, error=error
    )


def _there(on: str, failed: Check) -> str:
    """What to do about a check that failed on a device."""
    loads = failed.name.endswith(".loads")
    return "its runtime there says why" if loads else f"quantkit device clean {on}, then again: it is carried anew"


def _layers(bundle: Bundle, floats: Bundle, inputs: Path | None, runtime: str | None) -> Answer:
    """Layer by layer, by Polygraphy."""
    from quantkit.pipeline.reload import compare_layers
    from quantkit.report.bundle.engine import layers

    with showing() as progress:
        progress.begin(f"comparing the layers of {bundle.path} and {floats.path}")
        found, notes = compare_layers(bundle, floats, inputs=inputs, runtime=runtime)
    result = {"bundle": str(bundle.path), "floats": str(floats.path), "layers": [each.as_dict() for each in found]}
    return Answer(result, layers(found, notes), warnings=notes)
