"""An engine for a bundle, built on the device that will run it: the network goes there, the engine comes back.

Its name, its size at most and what is said of it are this machine's; the device gives bytes, which are what their hash
says. An engine is executable code: whoever builds one is trusted by all that run it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.bundle.disk import write_atomic
from quantkit.devices.answers import invalid
from quantkit.devices.probed import Probed
from quantkit.devices.reached import Reached
from quantkit.errors import InputError, Stopped
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.exporters.tensorrt import engine
from quantkit.exporters.tensorrt.engine import TensorrtOptions
from quantkit.exporters.tensorrt.exporter import refuse_flags
from quantkit.measurement.size import folder_of
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines
from quantkit.pipeline.export import Exported, export_bundle, options_of
from quantkit.pipeline.progress import Progress
from quantkit.runtimes.tensorrt.library import AHEAD_OF_TIME

# an engine's bytes: as many times its network's, and as many besides
_TIMES, _MORE = 4, 1 << 28


def export_on(
    bundle: Bundle,
    reached: Reached,
    to: str,
    changes: Sequence[str] = (),
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Build an engine of a bundle's network on a device, and put it in; the network is written first, if need be.

    Raises:
        InputError: `export-unsupported`; `gpu-absent`, `gpu-other`, `runtime-not-here`, of the device; what the build
            there has met; those of `export_bundle` and of the link.
    """
    progress, link, about = progress or Progress(), reached.link, reached.about
    name = link.name
    demand_builds(to)
    exporter = load_exporter(to, where="--to")
    options = _options(exporter, bundle, changes, about, name)
    # what this machine lacks does not matter, but what no engine can hold does
    exporter.accepts(options.model_copy(update={"engine": False}), LayerSpec())
    if not engines.has_network(bundle, to):
        bundle = export_bundle(bundle, to, [*changes, "engine=false"], dry_run=dry_run, progress=progress).bundle
    bundle.demand_writable()
    if dry_run:
        return Exported(bundle, to, [], [], dry_run=True)
    place = folder_of(to)
    bundle.demand_intact(f"{place}/network")
    folder = bundle.path / place
    plan = engine.planned(folder, options, [each.model_dump() for each in about.gpus])
    files = {path.name: path for path in sorted(folder.glob("network*"))}
    progress.plan({"carrying": 30.0, "build": 60.0})
    carrying, building = partial(progress.at, "carrying"), partial(progress.at, "build")
    reached.prepare(files.values(), progress=carrying)
    job: dict[str, Any] = {"network": link.carry("network", files, carrying), "library": plan.library, "sm": plan.sm}
    job |= {"gpu": plan.gpu, "flags": plan.flags, "seconds": plan.seconds}
    job |= {"profiles": [profile.model_dump(mode="json") for profile in plan.profiles]}
    built: _Built = link.run("engine", job, building, note=progress.note).one(_Built, "engine")
    most = _TIMES * sum(path.stat().st_size for path in files.values()) + _MORE
    if (built.library, built.sm, built.gpu) != (plan.library, plan.sm, plan.gpu) or not 0 < built.bytes <= most:
        raise invalid(name, f"an engine of {built.bytes} bytes for {built.gpu or ', '.join(built.sm)}")
    with tempfile.TemporaryDirectory(
        dir=bundle.path.resolve().parent, prefix=f".{bundle.path.name}-{place}-"
    ) as beside:
        _demand_room(Path(beside), 2 * built.bytes)
        (Path(beside) / place).mkdir()
        path, record = f"{place}/{plan.engine}", f"{place}/{plan.record}"
        made = Path(beside) / path
        link.fetch(built.sha256, built.bytes, made, lambda share, words: building(1.0, words))
        if made.stat().st_size != built.bytes:
            raise invalid(name, f"{made.stat().st_size} bytes, not {built.bytes}")
        write_atomic(Path(beside) / record, plan.described(built, built_on=name))
        by = f"{built.library} {built.version}" + (f" for {plan.gpu}, driver {plan.driver}" if plan.gpu else "")
        said = [decision(to, NOTE, path, f"built on {name} by {by}")]
        return Exported(engines.put(bundle, Path(beside), path, (path, record), said), to, [], said, engine=path)


def demand_builds(to: str) -> None:
    """Refuse an exporter that builds nothing. Raises InputError `export-unsupported`."""
    if not load_exporter(to, where="--to").builds:
        raise InputError(
            "export-unsupported",
            where=f"--on, --to {to}",
            value="nothing that a device would be needed for",
            rule="what is built for the GPU of a device is built there",
            remedy=f"quantkit export BUNDLE --to {to}, here",
        )


def _options(exporter: Any, bundle: Bundle, changes: Sequence[str], about: Probed, name: str) -> TensorrtOptions:
    """For the device's GPU, where nobody asked for another and the library builds for others."""
    asked = options_of(exporter, changes, bundle)
    wanted = {change.partition("=")[0]: None for change in changes}
    ahead = asked.get("library", exporter.runtimes[0]) in AHEAD_OF_TIME
    gpus = [each.model_dump() for each in about.gpus]
    options = TensorrtOptions(**engines.here(asked, wanted, [], gpus))
    refuse_flags(options)
    about.demand_own([options.library.replace("_", "-")], name, f"an engine is built by {options.library} there")
    if not gpus and not (ahead and options.sm):
        rule = "an engine is built on the GPU that will run it, or ahead of time for one that is named"
        raise InputError("gpu-absent", where=name, value="no NVIDIA GPU", rule=rule, remedy="another device")
    if gpus and not ahead and options.sm != gpus[0]["sm"]:
        value, rule = f"SM {gpus[0]['sm']}", f"SM {options.sm} is asked for"
        raise InputError("gpu-other", where=name, value=value, rule=rule, remedy="leave out sm, or another device")
    if not options.engine:
        raise InputError("engine-missing", where="engine", value="false", rule="--on builds one", remedy="leave it out")
    return options


def _demand_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        value, rule = f"the engine takes {need / 1e6:,.0f} MB while it is put in", f"{free / 1e6:,.0f} MB are free"
        raise Stopped("disk-full", where=str(folder.parent), value=value, rule=rule, remedy="make room")


class _Built(engine.Built, allow_inf_nan=False):
    """As a stranger says it."""
