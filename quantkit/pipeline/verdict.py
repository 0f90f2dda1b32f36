"""One verdict of a bundle: speed against the float model's, checks, and what other runtimes say beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Check, LayerEntry, Manifest, Verdict
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.measurement.engine_layers import NAME
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import MeasuredFormat, sentence, speed_up, verdict, with_prompts
from quantkit.recipe import ExportStep
from quantkit.report.on_devices import DeviceRows
from quantkit.runtimes import of_one_file, timed
from quantkit.target import Target

if TYPE_CHECKING:
    from quantkit.stats.deciding.apart import SpeedUp

RUNTIME = "onnxruntime"


def format_of(layers: Iterable[LayerEntry]) -> str:
    """The format of most quantized layers; float32 where there are none."""
    counts = Counter(str(layer.scheme.get("format")) for layer in layers)
    return counts.most_common(1)[0][0] if counts else "float32"


def is_timing(row: Row) -> bool:
    """Whether a row is about the machine that it was measured on."""
    return row.name.startswith(
        ("latency.", "across.", "throughput.", "bandwidth.", "tax.", "memory.", "ceiling.", "energy.")
    )


def of_original(rows: Sequence[Row], source: str, on: str | None = None) -> list[Row]:
    """The rows that set a bundle against the model of hash `source` that it was made from, not against others.

    Of a runtime's timings, those of the device that it was timed on last: two devices' times make no curve.

    Args:
        on: a device that is reached from here; None: this machine, or whichever the bundle was on.
    """
    found = [
        row
        for row in rows
        if row.on == on
        and (
            row.baseline is None
            or row.baseline.subject == source
            # a bundle's own other export, in its own runtime
            or (row.name.startswith("across.") and row.baseline.subject == row.subject)
        )
    ]
    last = {row.runtime: row.device for row in found if row.name.startswith("latency.")}
    # ceilings are of no runtime, and belong to whichever was timed there
    counts = {runtime: [device] for runtime, device in last.items()}
    return [
        row
        for row in found
        if not last or not is_timing(row) or row.device in counts.get(row.runtime, list(last.values()))
    ]


def decide(
    rows: Sequence[Row],
    checks: Sequence[Check],
    layers: Sequence[LayerEntry],
    target: Target,
    exports: Sequence[Mapping[str, Any]] = (),
) -> Verdict | None:
    """The verdict on the batches of the target that were measured; None where nothing was, or nothing is quantized.

    Of a decoder it rests on its steps, and says of its prompts what holds beside that.

    Args:
        exports: of the recipe, as the manifest has them.
    """
    if not layers:
        return None
    runtimes = timed({row.runtime for row in rows if row.runtime is not None})
    by_runtime = {name: [row for row in rows if row.runtime == name] for name in runtimes}
    runtime = next((name for name, own in by_runtime.items() if any(map(_is_latency, own))), RUNTIME)
    own = by_runtime[runtime]
    steps = [row for row in own if row.name == "latency.decode_step"]
    passes = [row for row in own if row.name == "latency.prefill"]
    measured = {row.batch for row in steps or passes if row.batch is not None}
    batches = [batch for batch in target.batches if batch in measured] or sorted(measured)
    # what an engine does otherwise than asked is a decision, and an error under --strict: no gate
    checks = [check for check in checks if check.name != NAME]
    failed = [check for check in checks if not check.ok]
    if not batches and not failed:
        return None
    found = verdict(MeasuredFormat(format_of(layers), own, checks), batches or target.batches)
    said = []
    others = [name for name in of_one_file(RUNTIME) if name != RUNTIME]
    if runtime in others:
        said.append(f"timed in {runtime} alone: what {RUNTIME} makes of the file is not known")
    for other in others if runtime == RUNTIME else ():
        said += faster(by_runtime[other], own, other)
    said += across(rows)
    found = found.model_copy(update={"because": [*found.because, *said]})
    return (
        with_prompts(found, own, setting=_setting(runtime, exports, target, layers)) if steps and not failed else found
    )


def by_device(manifest: Manifest, rows: Sequence[Row]) -> list[DeviceRows]:
    """What was measured on each device that is reached from here, against the model that the bundle was made from, and
    what follows from it: nothing from an emulator's times, which say nothing of any machine."""
    exports, found = manifest.recipe.get("export") or [], []
    for name in dict.fromkeys(row.on for row in rows if row.on is not None):
        own = of_original(rows, manifest.model.source.sha256, name)
        judged = None
        if not any("emulated" in row.flags for row in own):
            with suppress(InputError):
                judged = decide(own, manifest.checks, manifest.layers, target_of(manifest), exports)
        if own:
            found.append(DeviceRows(name, own, judged))
    return found


def target_of(manifest: Manifest) -> Target:
    """What a bundle was made for; this machine where it does not say. Raises InputError: those of a target."""
    from quantkit.pipeline.request import this_machine

    stored = manifest.target
    if not stored:
        return Target.load(this_machine())
    return Target.from_dict({key: value for key, value in stored.items() if key != "name"}, name=str(stored["name"]))


def _is_latency(row: Row) -> bool:
    return row.name.startswith("latency.")


def across(rows: Sequence[Row]) -> list[str]:
    """How a runtime does against another one, timed in turns: the first step and the first prompt; a line or none."""
    said = []
    for name in ("decode_step", "prefill"):
        row = next((row for row in rows if row.name == f"across.{name}" and speed_up(row)), None)
        if row is not None:
            # as any other time is told
            told = sentence(row.model_copy(update={"name": f"latency.{name}"}))
            other, form = (row.settings.get(f"baseline_{what}") for what in ("runtime", "format"))
            said.append(f"{row.runtime} and {other} ({form}) in turns: {told}")
    return said


def faster(own: Sequence[Row], plain: Sequence[Row], runtime: str) -> list[str]:
    """Where another runtime is faster than the first with the same file, beyond both intervals; a line or none.

    Both were set against the same float model, each in a run of its own: what is compared is how often as fast as that
    they were.
    """

    def cells(rows: Sequence[Row]) -> dict[Any, SpeedUp]:
        found = {
            (
                row.name,
                row.batch,
                row.device,
                row.settings.get("threads"),
                *sorted((row.shape or {}).items()),
            ): speed_up(row)
            for row in rows
            if _is_latency(row)
        }
        return {cell: speed for cell, speed in found.items() if speed is not None and not speed.doubt}

    before, found = cells(plain), []
    for cell, ours in cells(own).items():
        theirs = before.get(cell)
        if theirs is None or ours.interval[0] <= theirs.interval[1]:
            continue
        name, batch, shape = cell[0], cell[1], dict(cell[4:])
        steps = name == "latency.decode_step"
        where = f"batch {batch}" if steps else f"{shape.get('new_tokens')} tokens at batch {batch}"
        found.append(f"{where} {ours.ratio:.2f} times, not {theirs.ratio:.2f}")
    return [f"{runtime} is faster with this file, against float32: {'; '.join(found)}"] if found else []


def _setting(runtime: str, exports: Sequence[Mapping[str, Any]], target: Target, layers: Sequence[LayerEntry]) -> str:
    """Of what is exported for the runtime that is timed, how prompts are made faster; "" where it has no way."""
    for name, options in (each for step in exports for each in step.items()):
        exporter, step = load_exporter(name), ExportStep(name=name, options=dict(options or {}))
        if runtime in exporter.runtimes and (found := exporter.for_prompts(step.settings, target, layers)):
            return found
    return ""
