"""Whether a bundle is whole on a device, and loads in the runtimes that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle, Check
from quantkit.bundle.manifest import UNLISTED
from quantkit.devices import job as jobs
from quantkit.devices.answers import CheckResult, invalid, read
from quantkit.devices.asked.room import Ready, unasked
from quantkit.devices.collect import CollectedCells
from quantkit.devices.job import Job
from quantkit.devices.link import Link, carry
from quantkit.errors import InputError
from quantkit.pipeline.finished.reload import exports_of
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.progress import Progress

# what a device may have
RUNTIMES = ("onnxruntime", "llama_cpp", "openvino")


def verify_on(
    bundle: Bundle, link: Link, progress: Progress | None = None, *, ready: Ready = unasked
) -> tuple[list[Check], list[str]]:
    """Carry a bundle to a device, hash its files there, load each export in its runtime and make a step in it.

    Args:
        ready: told the largest export's files before anything is carried: they are loaded one after another.

    Returns:
        the checks, and a note for each export whose runtime the device does not have.

    Raises:
        InputError: `hash-mismatch`, it is not whole here; what the device answers; those of the link.
    """
    progress = progress or Progress()
    here = bundle.verify()
    for check in here:
        if not check.ok:
            rule, remedy = "what is carried is what the manifest says", f"quantkit verify {bundle.path}"
            raise InputError("hash-mismatch", where=check.where, value=check.name, rule=rule, remedy=remedy)
    exports = exports_of(bundle, RUNTIMES)
    ready(max(map(_loaded, exports.values()), key=lambda files: sum(path.stat().st_size for path in files), default=[]))
    progress.plan({"carrying": 60.0, "verifying": 20.0})
    listed = [*(entry.path for entry in bundle.manifest.files), *UNLISTED]
    files = {name: path for name in sorted(listed) if (path := bundle.path / name).is_file()}
    place = carry(link, "bundle", files, lambda share, words: progress.at("carrying", share, words))
    work = jobs.Verify(
        bundle=place,
        loads={name: f"{place}/{path.relative_to(bundle.path).as_posix()}" for name, path in exports.items()},
        graphs=holds_graph(bundle),
    )
    answers = CollectedCells.of(link, Job(work=work), progress, "verifying")
    found = [read(CheckResult, row, link.name) for row in answers.cells.get("checks", ())]
    names = [each.name for each in found]
    hashed = [check.name for check in here]
    loads = {f"{name}.loads": name for name in exports}
    if names[: len(hashed)] != hashed or not set(names[len(hashed) :]) <= set(loads):
        raise invalid(link.name, f"checks: {', '.join(names)}")
    checks = [
        Check(name=each.name, value=float(not each.ok), limit=0.0, ok=each.ok, where=each.where) for each in found
    ]
    whole = all(each.ok for each in found[: len(hashed)])
    notes = [f"{link.name} has no {name}: not loaded there" for check, name in loads.items() if check not in names]
    return checks, notes if whole else ["not loaded: files differ"]


def _loaded(path: Path) -> list[Path]:
    return [each for each in (path if path.is_dir() else path.parent).rglob("*") if each.is_file()]


def verify_at(on: str, bundle: Bundle, progress: Progress | None = None, **how: Any) -> tuple[list[Check], list[str]]:
    """`verify_on` of a device's name or address; `how` is that of `reach`. Raises InputError: those of it as well."""
    from quantkit.devices.reached import reach

    with reach(on, **how) as found:
        return verify_on(bundle, found.link, progress, ready=found.ready(progress))
