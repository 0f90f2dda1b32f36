"""Ask a device for more than the times of one bundle: ceilings and a target, a bundle's integrity, free space, times of
two bundles in turns, text, an engine.

This machine decides an engine's name, its largest size and its description. The device sends bytes, which must match
their hash. An engine is executable code: everyone who runs it trusts its builder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from quantkit.bundle import Bundle, Check
from quantkit.bundle.disk import walk, write_atomic, writing
from quantkit.bundle.manifest import UNLISTED
from quantkit.content import Closed, find, read_yaml, validated
from quantkit.devices.answers import (
    ROUND,
    Bytes,
    CeilingSamples,
    Cells,
    CheckResult,
    MadeTokens,
    RoundTimes,
    believed,
    invalid,
)
from quantkit.devices.link import busy
from quantkit.devices.named import SIZE, NamedDevice, Reached, shell, target_path
from quantkit.devices.probed import Probed
from quantkit.devices.sides import running
from quantkit.errors import InputError, Stopped
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.exporters.tensorrt import engine
from quantkit.exporters.tensorrt.engine import TensorrtOptions
from quantkit.exporters.tensorrt.exporter import refuse_flags
from quantkit.measurement.doctor import figures
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.size import folder_of
from quantkit.measurement.timing.clocks import Between
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, LEAST, MOST, SIDES, RoundsJob, joined
from quantkit.measurement.timing.schedule import Shape, Timing
from quantkit.passes import NOTE, decision
from quantkit.pipeline import engines
from quantkit.pipeline.export import Exported, export_bundle, options_of
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.measure import config_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.reload import exports_of
from quantkit.runtimes import load_runtime, timed
from quantkit.runtimes.child import Report
from quantkit.runtimes.generate import demand_decoder, demand_tokens
from quantkit.runtimes.tensorrt.library import AHEAD_OF_TIME
from quantkit.target import Target

# repetitions of each ceiling, and the expected ceilings
_RUNS = 15
_MEASURED = [("ceiling.read", None), ("ceiling.copy", None), ("ceiling.compute", "fp32"), ("ceiling.compute", "int8")]
# most bytes of an engine: this many times its network's, plus this many
_TIMES, _MORE = 4, 1 << 28
_ARM = ("aarch64", "arm64")
_Count = Annotated[int, Field(ge=0, le=1 << 30)]


# --- its ceilings and its target --------------------------------------------------------------------------------------


def doctor_on(reached: Reached, progress: Progress, *, write: bool = False) -> dict[str, Any]:
    """Measure a device's ceilings.

    Args:
        write: True to save a target with them in the user's settings.

    Returns:
        `device`, `machine` (see `Probed`), `measurements` (rows), `written` (a path or None), `warnings`.

    Raises:
        InputError: `emulated`, with `write`; `answer-invalid`; those of the link.
        MissingDependency: onnx, here.
    """
    progress.plan({"carrying": 20.0, "measuring": 20.0})
    link = reached.link
    link.install(partial(progress.at, "carrying"))

    def look(answers: Cells, cell: str) -> None:
        if write and cell == "about" and answers.about.emulated:
            rule = "times of an emulator apply to no machine and make no target"
            remedy, value = "leave out --write, or measure on the machine itself", answers.about.machine
            raise InputError("emulated", answers.on, f"its {value} is emulated", rule, remedy)

    job = {"graphs": reached.carry_graphs(), "size": SIZE, "runs": _RUNS}
    answers = link.run("doctor", job, partial(progress.at, "measuring"), row=look)
    about, ceilings = answers.about, answers.one(CeilingSamples, "ceilings").ceilings
    if [(ceiling.name, ceiling.settings.get("compute_type")) for ceiling in ceilings] != _MEASURED:
        raise invalid(answers.on, f"ceilings: {', '.join(ceiling.name for ceiling in ceilings)}")
    with believed(answers.on):
        rows = [ceiling.row(device=about.device(answers.on), versions=about.versions) for ceiling in ceilings]
    rows = [row.model_copy(update={"flags": [*row.flags, *about.flags]}) for row in rows]
    target = target_of(answers.on, reached.about, ceilings, datetime.now(UTC).date()) if write else None
    warnings = ["it is an emulator: its times apply to no machine"] if about.emulated else []
    warnings += [
        f"{row.name} ({row.unit}): two halves of the runs differ by {row.aa_spread:.0%}"
        for row in rows
        if "noisy" in row.flags
    ]
    return {
        "device": answers.on,
        "machine": reached.about.model_dump(mode="json"),
        "measurements": [row.as_dict() for row in rows],
        "written": str(write_target(target)) if target else None,
        "warnings": warnings,
    }


def target_of(name: str, about: Probed, ceilings: Sequence[Ceiling], when: date) -> Target:
    """Return a target for a device's processor.

    Args:
        name: name of the device.
        about: its own description.
        ceilings: result of `ceilings.measured` for `read`, `copy` and `compute`.
        when: date of the measurement.
    """
    # the shipped target: figures measured on this machine do not apply to the device
    target = Target.from_dict(read_yaml(find("export", _shipped(about))), name=name)
    measured = figures(target, ceilings, {"memory_limit": about.memory, "last_level_cache": about.last_level_cache})
    source = f"measured by quantkit device doctor {name} on {about.processor}, {about.cores} cores, {when}"
    data = target.resolve({"figures": measured, "isa": about.isa, "source": source}).as_dict()
    summary = f"{about.model or about.processor}, {about.cores} cores: {name}, figures measured there on {when}"
    return Target.from_dict({**data, "summary": summary}, name=name)


def usual(name: str, about: Probed) -> str:
    """Return the target of a device: its own if saved, else that of its architecture."""
    own = target_path(name)
    return str(own) if own.is_file() else _shipped(about)


def _shipped(about: Probed) -> str:
    return "cpu-arm" if about.machine.lower() in _ARM else "cpu-x86"


def write_target(target: Target) -> Path:
    """Write the target's YAML in the user's settings. Raises InputError `file-unwritable`, Stopped `disk-full`."""
    path = target_path(target.name)
    data = {key: value for key, value in target.as_dict().items() if key != "name" and value is not None}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).encode())
    return path


# --- a bundle's integrity there, and free room ------------------------------------------------------------------------


def verify_on(bundle: Bundle, reached: Reached, progress: Progress | None = None) -> tuple[list[Check], list[str]]:
    """Carry a bundle to a device, hash its files there, load each export in its runtime and make a step.

    Returns:
        The checks, and a note for each export whose runtime the device lacks.

    Raises InputError: `hash-mismatch`, the bundle is damaged here; `answer-invalid`; those of the link.
    """
    progress, link = progress or Progress(), reached.link
    here = bundle.verify()
    for check in here:
        if not check.ok:
            rule, remedy = "only a bundle that matches its manifest is carried", f"quantkit verify {bundle.path}"
            raise InputError("hash-mismatch", check.where, check.name, rule, remedy)
    exports = exports_of(bundle, [name for name in timed() if load_runtime(name).floats == name])
    progress.plan({"carrying": 60.0, "verifying": 20.0})
    carrying = partial(progress.at, "carrying")
    # they are loaded one at a time
    reached.prepare(max(map(_loaded, exports.values()), key=_bytes, default=[]), progress=carrying)
    listed = [*(entry.path for entry in bundle.manifest.files), *UNLISTED]
    files = {name: path for name in sorted(listed) if (path := bundle.path / name).is_file()}
    place = link.carry("bundle", files, carrying)
    loads = {name: f"{place}/{path.relative_to(bundle.path).as_posix()}" for name, path in exports.items()}
    job = {"bundle": place, "loads": loads, "graphs": holds_graph(bundle)}
    answers = link.run("verify", job, partial(progress.at, "verifying"))
    results = [result for _, result in answers.all(CheckResult, "checks")]
    names, hashed = [result.name for result in results], [check.name for check in here]
    loading = {f"{name}.loads": name for name in exports}
    if names[: len(hashed)] != hashed or not set(names[len(hashed) :]) <= set(loading):
        raise invalid(link.name, f"checks: {', '.join(names)}")
    checks = [Check(name=it.name, value=float(not it.ok), limit=0.0, ok=it.ok, where=it.where) for it in results]
    notes = [f"{link.name} has no {name}: not loaded there" for check, name in loading.items() if check not in names]
    return checks, notes if all(it.ok for it in results[: len(hashed)]) else ["not loaded: files differ"]


def _loaded(path: Path) -> list[Path]:
    return [file for file in (path if path.is_dir() else path.parent).rglob("*") if file.is_file()]


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


class Cleaned(Closed):
    """Counts of the removed files of each kind, and bytes."""

    bundles: _Count
    wheels: _Count
    bytes: Bytes


def clean(device: NamedDevice) -> Cleaned:
    """Remove the bundles and wheels there, unless the device is busy; needed ones are carried again later.

    Raises:
        InputError: `device-busy`; `workdir-foreign`; errors of the connection.
        Stopped: `device-gone`.
    """
    with shell(device) as way:
        answer = way.call("files", {"workdir": device.workdir, "do": "clean"}, seconds=600.0)
    if "holder" in answer:
        raise busy(device.name, answer["holder"])
    return validated(
        Cleaned, answer, where=device.name, code="answer-invalid", rule="an answer counts the removed files"
    )


# --- two bundles in turns, and text -----------------------------------------------------------------------------------


class DeviceTimer:
    """Timer of two bundles on a device: see `pipeline.compare.times.RoundsTimer`."""

    def __init__(self, reached: Reached) -> None:
        self._reached, self.device = reached, reached.link.name

    def __call__(self, job: RoundsJob, report: Report) -> list[Timing]:
        """Return the raw times of both. Raises InputError: `emulated`; `answer-invalid`; those of the link."""
        link, sides = self._reached.link, {CANDIDATE: Path(job.candidate), BASELINE: Path(job.baseline)}
        files = {side: _files(path) for side, path in sides.items()}
        beside = sum(running(path, job.shapes, "") for path in sides.values())
        self._reached.prepare([path for of in files.values() for path in of.values()], beside, report)
        asked = asdict(job)
        for side, path in sides.items():
            place = link.carry(side, files[side], report)
            asked[side] = place if path.is_dir() else f"{place}/{path.name}"
        if job.samples:
            asked["samples"] = f"{link.carry('samples', {'samples.npz': Path(job.samples)}, report)}/samples.npz"

        def come(answers: Cells, cell: str) -> None:
            if cell == "about":
                answers.about.demand_times(self.device)

        rounds = [times for _, times in link.run("rounds", asked, report, row=come).all(RoundTimes, ROUND)]
        if not LEAST <= len(rounds) <= MOST:
            raise invalid(self.device, f"{len(rounds)} rounds")
        try:
            parts = joined([times.round({*SIDES}, self.device) for times in rounds])
            # within each round and over all rounds; a restart of the machine resets its counter
            looks = [(times.before, times.after) for times in rounds] + [(rounds[0].before, rounds[-1].after)]
            slowed = any(Between.of(before, after, counted=True).throttled for before, after in looks)
            flags = ("throttled",) if slowed else ()
            return [replace(timing, shape=shape, flags=flags) for shape, timing in zip(job.shapes, parts, strict=True)]
        except ValueError:
            raise invalid(self.device, "rounds that do not fit together") from None


def generate_on(
    bundle: Bundle,
    reached: Reached,
    prompt: str,
    progress: Progress | None = None,
    *,
    runtime: str,
    new_tokens: int = 64,
    sample: bool = False,
    seed: int = 0,
    chat: bool = False,
) -> dict[str, Any]:
    """Continue a prompt on a device: it receives and returns tokens; see `Runtime.generate`.

    Raises InputError: `answer-invalid`, those of the link; `not-a-decoder`, `no-tokenizer`, `prompt-empty`.
    """
    progress, link = progress or Progress(), reached.link
    demand_decoder(bundle)
    runner = load_runtime(runtime)
    tokenizer = runner.tokenizer(bundle)
    ids = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt, special=not chat)
    demand_tokens(len(ids))
    files = _files(runner.checked(bundle))
    beside = running(bundle.path, [Shape("decode", 1, len(ids) + new_tokens)], runtime)
    models = list(files.values())
    if runner.floats is None:
        # torch holds the files and every weight as a float
        width = 4 if "float32" in str(config_of(bundle).get("dtype")) else 2
        beside += width * sum(prod(layer.shape) for layer in bundle.manifest.layers) + _bytes(models)
        models = []
    progress.plan({"carrying": 30.0, "generating": 30.0})
    carrying, settings = partial(progress.at, "carrying"), tokenizer.generation
    reached.prepare(models, beside, carrying)
    sampling = {
        "sample": sample,
        "temperature": float(settings.get("temperature") or 1.0),
        "top_k": int(settings.get("top_k", 50) or 0),
        "top_p": float(settings.get("top_p") or 1.0),
    }
    job = {"place": link.carry("subject", files, carrying), "runtime": runtime, "ids": list(ids), "seed": seed}
    job |= {"ends": sorted(tokenizer.ends), "new_tokens": new_tokens, "sampling": sampling}
    tokens = link.run("generate", job, partial(progress.at, "generating")).one(MadeTokens, "made")
    count, steps = len(tokens.ids), tokens.seconds - tokens.first_token_s
    if count > new_tokens:
        raise invalid(link.name, f"{count} tokens, not at most {new_tokens}")
    return {
        "text": tokenizer.decode(list(tokens.ids)),
        "tokens": count,
        "seconds": tokens.seconds,
        "first_token_s": tokens.first_token_s,
        "tokens_per_s": (count - 1) / steps if count > 1 and steps > 1e-9 else None,
        "device": link.name,
    }


def _files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {file.relative_to(path).as_posix(): file for file in walk(path)}
    return {file.name: file for file in sorted(path.parent.glob(f"{path.stem}.*"))}


# --- an engine --------------------------------------------------------------------------------------------------------


class _Built(engine.Built, allow_inf_nan=False):
    """`engine.Built` from an untrusted device: numbers must be finite."""


def export_on(
    bundle: Bundle,
    reached: Reached,
    to: str,
    changes: Sequence[str] = (),
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Build an engine of a bundle's network on a device and add it to the bundle; write the network first if it is
    missing.

    Raises:
        InputError: `export-unsupported`; `gpu-absent`, `gpu-other`, `runtime-not-here`, about the device; errors of the
            build there; those of `export_bundle` and of the link.
    """
    progress, link, about = progress or Progress(), reached.link, reached.about
    name = link.name
    demand_builds(to)
    exporter = load_exporter(to, where="--to")
    options = _options(exporter, bundle, changes, about, name)
    # limits of this machine do not matter; limits of every engine do
    exporter.accepts(options.model_copy(update={"engine": False}), LayerSpec())
    if not engines.has_network(bundle, to):
        bundle = export_bundle(bundle, to, [*changes, "engine=false"], dry_run=dry_run, progress=progress).bundle
    bundle.demand_writable()
    if dry_run:
        return Exported(bundle, to, [], [], dry_run=True)
    place = folder_of(to)
    bundle.demand_intact(f"{place}/network")
    folder = bundle.path / place
    plan = engine.planned(folder, options, [gpu.model_dump() for gpu in about.gpus])
    files = {path.name: path for path in sorted(folder.glob("network*"))}
    progress.plan({"carrying": 30.0, "build": 60.0})
    carrying, building = partial(progress.at, "carrying"), partial(progress.at, "build")
    reached.prepare(files.values(), progress=carrying)
    job: dict[str, Any] = {"network": link.carry("network", files, carrying), "library": plan.library, "sm": plan.sm}
    job |= {"gpu": plan.gpu, "flags": plan.flags, "seconds": plan.seconds}
    job |= {"profiles": [profile.model_dump(mode="json") for profile in plan.profiles]}
    built: _Built = link.run("engine", job, building, note=progress.note).one(_Built, "engine")
    most = _TIMES * _bytes(files.values()) + _MORE
    if (built.library, built.sm, built.gpu) != (plan.library, plan.sm, plan.gpu) or not 0 < built.bytes <= most:
        raise invalid(name, f"an engine of {built.bytes} bytes for {built.gpu or ', '.join(built.sm)}")
    with tempfile.TemporaryDirectory(
        dir=bundle.path.resolve().parent, prefix=f".{bundle.path.name}-{place}-"
    ) as beside:
        _demand_room(Path(beside), 2 * built.bytes)
        (Path(beside) / place).mkdir()
        path, record = f"{place}/{plan.engine}", f"{place}/{plan.record}"
        file = Path(beside) / path
        link.fetch(built.sha256, built.bytes, file, lambda share, words: building(1.0, words))
        if file.stat().st_size != built.bytes:
            raise invalid(name, f"{file.stat().st_size} bytes, not {built.bytes}")
        write_atomic(Path(beside) / record, plan.described(built, built_on=name))
        by = f"{built.library} {built.version}" + (f" for {plan.gpu}, driver {plan.driver}" if plan.gpu else "")
        notes = [decision(to, NOTE, path, f"built on {name} by {by}")]
        return Exported(engines.put(bundle, Path(beside), path, (path, record), notes), to, [], notes, engine=path)


def demand_builds(to: str) -> None:
    """Refuse an exporter without engines. Raises InputError `export-unsupported`."""
    if not load_exporter(to, where="--to").builds:
        value = "an export that needs no device"
        rule, remedy = "--on is for engines, which are built on their GPU", f"quantkit export BUNDLE --to {to}, here"
        raise InputError("export-unsupported", f"--on, --to {to}", value, rule, remedy)


def _options(exporter: Any, bundle: Bundle, changes: Sequence[str], about: Probed, name: str) -> TensorrtOptions:
    """Return options for the device's GPU, unless another is requested and the library can build for it."""
    asked = options_of(exporter, changes, bundle)
    wanted = {change.partition("=")[0]: None for change in changes}
    ahead = asked.get("library", exporter.runtimes[0]) in AHEAD_OF_TIME
    gpus = [gpu.model_dump() for gpu in about.gpus]
    options = TensorrtOptions(**engines.here(asked, wanted, [], gpus))
    refuse_flags(options)
    about.installed([options.library.replace("_", "-")], name, f"{options.library} on the device builds the engine")
    if not gpus and not (ahead and options.sm):
        rule = "an engine is built on its own GPU, or ahead of time for a named one"
        raise InputError("gpu-absent", name, "no NVIDIA GPU", rule, "another device")
    if gpus and not ahead and options.sm != gpus[0]["sm"]:
        value, rule = f"SM {gpus[0]['sm']}", f"the options ask for SM {options.sm}"
        raise InputError("gpu-other", name, value, rule, "leave out sm, or another device")
    if not options.engine:
        raise InputError("engine-missing", "engine", "false", "--on builds an engine", "remove it")
    return options


def _demand_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        value, rule = f"adding the engine takes {need / 1e6:,.0f} MB", f"{free / 1e6:,.0f} MB are free"
        raise Stopped("disk-full", str(folder.parent), value, rule, "make room")
