"""`quantkit verify`: whether a bundle is what it was."""

from __future__ import annotations

import quantkit
from quantkit.cli.answer import Answer
from quantkit.cli.options import BundlePath, Json
from quantkit.cli.progress import showing
from quantkit.errors import GateError


def verify(bundle: BundlePath, as_json: Json = False) -> Answer:
    """Check every file of a bundle, then load it again."""
    from quantkit.pipeline.reload import reload
    from quantkit.report import terminal

    opened = quantkit.load(bundle)
    with showing() as progress:
        progress.begin(f"verifying {bundle}")
        found = opened.verify()
        reloaded, notes = reload(opened) if all(check.ok for check in found) else ([], ["not loaded: files differ"])
    found = [*found, *reloaded]
    failed = next((check for check in found if not check.ok), None)
    error = None
    if failed is not None:
        error = GateError(
            "verify-failed",
            where=failed.where or str(bundle),
            value=f"{failed.name} is {failed.value}",
            rule=f"it is {failed.limit}" if failed.limit == 0 else f"at most {failed.limit}",
            remedy="fetch or compile the bundle again",
        )
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "checks": [{**check.model_dump(mode="json"), "where": check.where} for check in found],
    }
    return Answer(result, terminal.verified(opened.path, opened.manifest, found, notes), warnings=notes, error=error)
