"""One verdict of a bundle: speed against the float model's, checks, and what other runtimes say beside it.

What was measured of a bundle goes into it: rows of their kind are replaced, verdict, page and card follow.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, plugins
from quantkit.bundle import Bundle, Check, Decision, LayerEntry, Manifest, Verdict, inventory
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import NAME, stored
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.verdict import MeasuredFormat, sentence, speed_up, verdict, with_prompts
from quantkit.passes import decision
from quantkit.pipeline import engines as engine
from quantkit.pipeline.gates import judge, still_unjudged
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import runs_here
from quantkit.planning import efficiency
from quantkit.recipe import ExportStep, Gates
from quantkit.report.bundle.speed import DeviceRows
from quantkit.runtimes import of_one_file, timed
from quantkit.target import Target

if TYPE_CHECKING:
    from quantkit.measurement.accuracy.positions import Items
    from quantkit.measurement.engine_layers import Inspected
    from quantkit.stats.evidence import SpeedUp


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


HARM, REPORT = "harm.json", "report.html"


def keep(
    bundle: Bundle,
    rows: Sequence[Row],
    items: Items | None,
    runtime: str,
    against: str,
    progress: Progress,
    looked: Inspected | None = None,
    *,
    more: bool = False,
) -> None:
    """Put new rows into a bundle; those against the model that it was made from decide anew, on page and card too.

    Args:
        more: others follow: verdict, page and card wait for the last.

    Raises:
        InputError: `bundle-changed` meanwhile.
    """
    bundle, measured = Bundle.load(bundle.path), bundle.manifest.content_sha256
    manifest = bundle.manifest
    if manifest.content_sha256 != measured:
        raise InputError(
            "bundle-changed",
            where=str(bundle.path),
            value=manifest.content_sha256,
            rule=f"what was measured is {measured}",
            remedy="measure again, with nothing else at work on the bundle",
        )
    if not more:
        efficiency.keep([row.as_dict() for row in rows if "emulated" not in row.flags])
    if looked is not None:
        bundle = _with_engine(bundle, looked)
        manifest = bundle.manifest
    original = manifest.model.source.sha256
    if against != original:
        # rows that do not say what they are set against would pass for those of the original
        rows = [row for row in rows if row.baseline is not None]
    path = bundle.path / MEASUREMENTS
    new = {_kind(row, against) for row in rows}
    stored = read_rows(path) if path.is_file() else []
    together = [*(row for row in stored if _kind(row, original) not in new), *rows]
    files: dict[str, bytes | None] = {MEASUREMENTS: "".join(f"{row.line()}\n" for row in together).encode()}
    if against != original or more:
        bundle.put_all(files)
        return
    if items is not None:
        name = "items.safetensors" if runtimes_of(manifest)[:1] == [runtime] else f"items-{runtime}.safetensors"
        with tempfile.TemporaryDirectory() as temporary:
            items.save(Path(temporary) / "items")
            files[name] = limits.read(Path(temporary) / "items", limits.DATA)
    shown = of_original(together, original)
    manifest = _judged(manifest, shown)
    with contextlib.suppress(InputError):
        target = target_of(manifest)
        timed, here = any(row.name.startswith("latency.") and row.on is None for row in rows), runs_here(target)
        if timed and not here:
            progress.note(f"{target.name} is another machine: no verdict follows from what was timed here")
        # what was timed before stands as it was judged then
        counts = here if timed else manifest.verdict is not None
        exports = manifest.recipe.get("export") or []
        judged = decide(shown if counts else [], manifest.checks, manifest.layers, target, exports)
        # where it was timed on devices alone, the verdict is that of the last
        on_devices = [each.verdict for each in by_device(manifest, together) if each.verdict]
        manifest = manifest.model_copy(update={"verdict": judged or next(reversed(on_devices), None)})
    written, decisions = documents(manifest, shown, bundle.path, by_device(manifest, together))
    for each in decisions:
        progress.note(f"{each.where}: {each.reason}")
    bundle.put_all({**files, **written}, verdict=manifest.verdict, checks=manifest.checks, state=manifest.state)


def _with_engine(bundle: Bundle, found: Inspected) -> Bundle:
    """With what an engine says of its layers, in place of what was known before."""
    manifest = bundle.manifest
    return bundle.put_all(
        {engine.place(found): engine.data(found)},
        checks=[*(each for each in manifest.checks if each.name != found.check.name), found.check],
        decisions=[*engine.without(manifest.decisions), *found.decisions()],
    )


def _judged(manifest: Manifest, rows: Sequence[Row]) -> Manifest:
    """With the gates held against what is measured now; a gate that has no row stands as it was judged."""
    order = runtimes_of(manifest)
    known = [row for row in rows if row.runtime in order]
    ordered = sorted(known, key=lambda row: order.index(str(row.runtime))) + [row for row in rows if row not in known]
    checks, _ = judge(Gates.model_validate(manifest.recipe.get("gates") or {}), ordered)
    named: dict[str, Check] = {check.name: check for check in [*manifest.checks, *checks]}
    failed = any(not check.ok for name, check in named.items() if name.startswith("gate."))
    state = "gate_failed" if failed else "complete"
    decisions = still_unjudged(manifest.decisions, checks)
    return manifest.model_copy(update={"checks": list(named.values()), "state": state, "decisions": decisions})


def export_of(runtime: str) -> str:
    """What a runtime runs."""
    return next(name for name in _exporters() if runtime in load_exporter(name).runtimes)


def _exporters() -> list[str]:
    """All there are: those that ship first, the others only where none of these will do."""
    return [*plugins.EXPORTERS.shipped(), *plugins.EXPORTERS.offers()]


def runtimes_of(manifest: Manifest) -> list[str]:
    """That run the exports of a bundle, in the order of its recipe."""
    return [reader(name, options or {}) for step in manifest.recipe.get("export", []) for name, options in step.items()]


def options_of(bundle: Bundle, exporter: str) -> dict[str, Any]:
    """What an exporter was told of a bundle; nothing where it was not asked."""
    for step in bundle.manifest.recipe.get("export", []):
        if exporter in step:
            return dict(step[exporter] or {})
    return {}


def _kind(row: Row, against: str) -> tuple[Any, ...]:
    """Rows of one kind replace each other; those against another baseline, in another runtime, or timed on another
    machine stand beside each other. A row without baseline is one against `against`."""
    told = ("export", "kv_cache", "output", "surer_than", "way", "baseline_runtime")
    export = tuple(row.settings.get(key) for key in told)
    baseline = row.baseline.subject if row.baseline else against
    device = row.device.id if row.device and is_timing(row) else None
    return row.on, row.name, baseline, row.runtime, export, device, row.batch, tuple(sorted((row.shape or {}).items()))


def page(
    manifest: Manifest, rows: Sequence[Row], notes: Sequence[str], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[bytes | None, list[Decision]]:
    """`report.html`; None, with the reason, where plotly is missing."""
    from quantkit.report.bundle.document import document
    from quantkit.report.kit import html

    try:
        harm, engines = read_harm(folder), stored(folder)
        tree = document(manifest, rows, notes, harm=harm, engines=engines, devices=devices)
        return html.page(tree).encode(), []
    except QuantkitError as problem:
        return None, [decision("report", "page-not-made", REPORT, problem.line())]


def documents(
    manifest: Manifest, rows: Sequence[Row], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[dict[str, bytes | None], list[Decision]]:
    """Page and card of a finished bundle; the page is None where it cannot be made, so that no old one stays."""
    from quantkit.report.bundle import figures
    from quantkit.report.bundle.document import card

    notes = figures.notes(manifest)
    made, missing = page(manifest, rows, notes, folder, devices)
    return {REPORT: made, "README.md": card(manifest, rows, notes).encode()}, missing


def read_harm(folder: Path) -> Harm | None:
    """What `measurement.accuracy.harm` found, as it is kept in a bundle."""
    from pydantic import ValidationError

    try:
        return Harm.model_validate_json(limits.read(folder / HARM))
    except (OSError, ValidationError):
        return None


def with_documents(manifest: Manifest, rows: list[Row], notes: Sequence[str], folder: Path) -> Manifest:
    """Write page and card into a bundle; the manifest that lists them."""
    from quantkit.report.bundle.document import card

    if manifest.layers or manifest.verdict is not None or any(row.runtime == "onnxruntime" for row in rows):
        made, missing = page(manifest, rows, notes, folder)
        manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
        if made is not None:
            (folder / REPORT).write_bytes(made)
            manifest = manifest.model_copy(update={"files": inventory(folder)})
    (folder / "README.md").write_text(card(manifest, rows, notes), encoding="utf-8")
    return manifest.model_copy(update={"files": inventory(folder)})
