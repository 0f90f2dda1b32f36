"""`quantkit verify`: check that a bundle is intact."""

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
            metavar="BUNDLE", help="Instead, compare its TensorRT network with this float bundle's, layer by layer."
        ),
    ] = None,
    inputs: Annotated[Path | None, typer.Option(metavar="FILE.npz", help="With --layers: inputs of a graph.")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --layers: also compare an engine of tensorrt_rtx or tensorrt."),
    ] = None,
    expect: Annotated[
        str | None, typer.Option(metavar="HASH", help="Expected hash of the seal; at least 16 digits.")
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option(metavar="FILE|IDENTITY", help="Public key (SSH, PEM), allowed_signers or Sigstore identity."),
    ] = None,
    issuer: Annotated[str | None, typer.Option(metavar="URL", help="Issuer of the Sigstore identity.")] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm/--no-vllm", help="Run the checkpoint in vLLM too, where it was added.")
    ] = True,
    trust_remote_code: TrustRemoteCode = False,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    as_json: Json = False,
) -> Answer:
    """Check every file of a bundle and load it, here or on a device."""
    from quantkit.bundle import seal
    from quantkit.model.source import pretrained
    from quantkit.pipeline.reload import reload
    from quantkit.report import terminal

    demand_device(on, wheelhouse)
    opened = quantkit.load(bundle)
    if issuer is not None and signer is None:
        raise InputError("usage", "--issuer", "without --signer", "an issuer belongs to a signer")
    if expect is not None:
        seal.demand(opened.path, expect)
    signed = None if signer is None else seal.demand_signer(opened.path, signer, issuer)
    for config in sorted(opened.path.glob("*/config.json")) if trust_remote_code else ():
        pretrained.trust(config.parent)
    if layers is not None and on is not None:
        raise InputError("usage", "--on", "with --layers", "layers are only compared on this machine")
    if layers is not None:
        return _layers(opened, quantkit.load(layers), inputs, runtime)
    if inputs is not None or runtime is not None:
        option = "--inputs" if inputs is not None else "--runtime"
        raise InputError("usage", option, "without --layers", "this option belongs to --layers")
    with showing() as progress:
        progress.begin(f"verifying {bundle}")
        if on is not None:
            from quantkit.devices.asked import verify_on
            from quantkit.devices.named import reach

            with reach(on, wheelhouse=wheelhouse) as device:
                checks, notes = verify_on(opened, device, progress)
        else:
            checks = opened.verify()
            whole = all(check.ok for check in checks)
            reloaded, notes = reload(opened, served=vllm) if whole else ([], ["not loaded: files differ"])
            checks = [*checks, *reloaded]
    failed = next((check for check in checks if not check.ok), None)
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
        "checks": [{**check.model_dump(mode="json"), "where": check.where} for check in checks],
    }
    return Answer(
        result, terminal.verified(opened.path, opened.manifest, checks, notes, seals), warnings=notes, error=error
    )


def _there(on: str, failed: Check) -> str:
    """Return the remedy for a check that failed on a device."""
    again = f"quantkit device clean {on}, then verify again"
    return "read the error of its runtime" if failed.name.endswith(".loads") else again


def _layers(bundle: Bundle, floats: Bundle, inputs: Path | None, runtime: str | None) -> Answer:
    """Compare two bundles layer by layer, with Polygraphy."""
    from quantkit.pipeline.reload import compare_layers
    from quantkit.report.bundle.engine import layers

    with showing() as progress:
        progress.begin(f"comparing the layers of {bundle.path} and {floats.path}")
        compared, notes = compare_layers(bundle, floats, inputs=inputs, runtime=runtime)
    result = {"bundle": str(bundle.path), "floats": str(floats.path), "layers": [layer.as_dict() for layer in compared]}
    return Answer(result, layers(compared, notes), warnings=notes)
