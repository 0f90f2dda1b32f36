"""Keep a bundle's new measurements and give its one verdict: rows of the same kind are replaced, the pages rewritten.

The verdict rests on checks and on the speed against the float model; the figures of other runtimes stand beside it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quantkit import limits, plugins
from quantkit.bundle import Bundle, Check, Decision, LayerEntry, Manifest, Verdict, inventory
from quantkit.bundle.disk import Hashes
from quantkit.bundle.manifest import MEASUREMENTS
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters import load_exporter, reader
from quantkit.measurement.accuracy.harm import Harm
from quantkit.measurement.engine_layers import FALLBACK, NAME, stored
from quantkit.measurement.load import outcome
from quantkit.measurement.rows import Row, read_rows
from quantkit.measurement.timing.schedule import LARGEST
from quantkit.measurement.verdict import MeasuredFormat, sentence, speed_up, verdict, with_prompts
from quantkit.passes import decision
from quantkit.pipeline import engines
from quantkit.pipeline.gates import judge, near, still_unjudged
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import runs_here, this_machine
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
HARM, REPORT = "harm.json", "report.html"
# about the machine that they were measured on
_TIMINGS = (
    "latency.",
    "across.prefill",
    "across.decode_step",
    "throughput.",
    "bandwidth.",
    "tax.",
    "memory.",
    "ceiling.",
    "energy.",
    "load.",
)


def format_of(layers: Iterable[LayerEntry]) -> str:
    """Return the format of most quantized layers; float32 where there are none."""
    counts = Counter(str(layer.scheme.get("format")) for layer in layers)
    return counts.most_common(1)[0][0] if counts else "float32"


def is_timing(row: Row) -> bool:
    """Tell whether a row is about the machine that it was measured on."""
    return row.name.startswith(_TIMINGS)


def of_original(rows: Sequence[Row], source: str, on: str | None = None) -> list[Row]:
    """Return rows comparing a bundle with its own source, the model of hash `source`, not with others.

    Of a runtime's timings, those of the latest device remain: two devices' times make no curve.

    Args:
        on: device reached from here; None: this machine, or whichever the bundle was on.
    """

    def is_own(row: Row) -> bool:
        base = row.baseline
        # or a bundle's own other export, in its own runtime
        across = base is not None and row.name.startswith("across.") and base.subject == row.subject
        return row.on == on and (base is None or base.subject == source or across)

    own = list(filter(is_own, rows))
    last = {row.runtime: row.device for row in own if row.name.startswith(("latency.", "load."))}
    # ceilings are of no runtime, and belong to whichever was timed there
    counts = {runtime: [device] for runtime, device in last.items()}
    anywhere = list(last.values())
    return [row for row in own if not last or not is_timing(row) or row.device in counts.get(row.runtime, anywhere)]


def decide(
    rows: Sequence[Row],
    checks: Sequence[Check],
    layers: Sequence[LayerEntry],
    target: Target,
    exports: Sequence[Mapping[str, Any]] = (),
) -> Verdict | None:
    """Decide on the batches of the target that were measured; None where nothing was, or nothing is quantized.

    Of a decoder it rests on its steps, and says of its prompts what holds beside that.

    Args:
        exports: of the recipe, as the manifest has them.
    """
    if not layers:
        return None
    runtimes = timed({row.runtime for row in rows if row.runtime is not None})
    by_runtime = {name: [row for row in rows if row.runtime == name] for name in runtimes}
    has_times = (name for name, own in by_runtime.items() if any(row.name.startswith("latency.") for row in own))
    runtime = next(has_times, RUNTIME)
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
    judged = verdict(MeasuredFormat(format_of(layers), own, checks), batches or target.batches)
    beside = []
    most = max(measured, default=0)
    if steps and not failed and any(most < batch <= LARGEST for batch in target.batches):
        # a batch that was not timed has not won
        judged = (
            judged.model_copy(update={"answer": "ship_up_to", "batch": most}) if judged.answer == "ship_it" else judged
        )
        beside.append(f"batches above {most}: not timed; `quantkit measure BUNDLE` times them")
    others = [name for name in of_one_file(RUNTIME) if name != RUNTIME]
    if runtime in others:
        beside.append(f"timed in {runtime} alone: what {RUNTIME} makes of the file is not known")
    for other in others if runtime == RUNTIME else ():
        beside += faster(by_runtime[other], own, other)
    beside += across(rows)
    loaded = outcome([row for row in rows if row.name.startswith("load.")])
    beside += [f"under load in vLLM: {loaded.text}"] if loaded else []
    judged = judged.model_copy(update={"because": [*judged.because, *beside]})
    if not steps or failed:
        return judged
    return with_prompts(judged, own, setting=_setting(runtime, exports, target, layers))


def by_device(manifest: Manifest, rows: Sequence[Row]) -> list[DeviceRows]:
    """Return the measurements on each device reached from here, against the bundle's source, and the conclusions from
    them; none from an emulator's times, because they hold for no machine.
    """
    exports, devices = manifest.recipe.get("export") or [], []
    for name in dict.fromkeys(row.on for row in rows if row.on is not None):
        own = of_original(rows, manifest.model.source.sha256, name)
        judged = None
        if not any("emulated" in row.flags for row in own):
            with contextlib.suppress(InputError):
                judged = decide(own, manifest.checks, manifest.layers, target_of(manifest), exports)
        if own:
            devices.append(DeviceRows(name, own, judged))
    return devices


def target_of(manifest: Manifest) -> Target:
    """Return a bundle's target; this machine if it has none. Raises InputError: those of a target."""
    target = manifest.target
    if not target:
        return Target.load(this_machine())
    return Target.from_dict({key: value for key, value in target.items() if key != "name"}, name=str(target["name"]))


def across(rows: Sequence[Row]) -> list[str]:
    """Say how a runtime does against another one, timed in turns: the first step and the first prompt."""
    lines = []
    for name in ("decode_step", "prefill"):
        row = next((row for row in rows if row.name == f"across.{name}" and speed_up(row)), None)
        if row is not None:
            # as any other time is told
            told = sentence(row.model_copy(update={"name": f"latency.{name}"}))
            other, form = (row.settings.get(f"baseline_{what}") for what in ("runtime", "format"))
            lines.append(f"{row.runtime} and {other} ({form}) in turns: {told}")
    return lines


def faster(own: Sequence[Row], plain: Sequence[Row], runtime: str) -> list[str]:
    """Say where another runtime is faster than the first with the same file, beyond both intervals; a line or none.

    Both were set against the same float model, each in a run of its own: what is compared is how often as fast as that
    they were.
    """

    def cells(rows: Sequence[Row]) -> dict[Any, SpeedUp]:
        ups = {}
        for row in rows:
            speed = speed_up(row) if row.name.startswith("latency.") else None
            if speed is not None and not speed.doubt:
                shape = sorted((row.shape or {}).items())
                ups[row.name, row.batch, row.device, row.settings.get("threads"), *shape] = speed
        return ups

    before, places = cells(plain), []
    for cell, ours in cells(own).items():
        theirs = before.get(cell)
        if theirs is None or ours.interval[0] <= theirs.interval[1]:
            continue
        name, batch, shape = cell[0], cell[1], dict(cell[4:])
        steps = name == "latency.decode_step"
        where = f"batch {batch}" if steps else f"{shape.get('new_tokens')} tokens at batch {batch}"
        places.append(f"{where} {ours.ratio:.2f} times, not {theirs.ratio:.2f}")
    return [f"{runtime} is faster with this file, against float32: {'; '.join(places)}"] if places else []


def _setting(runtime: str, exports: Sequence[Mapping[str, Any]], target: Target, layers: Sequence[LayerEntry]) -> str:
    """Say how prompts are made faster by the export for the runtime that is timed; "" where it has no way."""
    for name, options in (item for step in exports for item in step.items()):
        exporter, step = load_exporter(name), ExportStep(name=name, options=dict(options or {}))
        if runtime in exporter.runtimes and (setting := exporter.for_prompts(step.settings, target, layers)):
            return setting
    return ""


def keep(
    bundle: Bundle,
    rows: Sequence[Row],
    items: Items | None,
    runtime: str,
    against: str,
    progress: Progress,
    looked: Inspected | None = None,
    *,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    more: bool = False,
) -> None:
    """Put new rows into a bundle; those against the model that it was made from decide anew, on page and card too.

    Args:
        beside: files that are kept with the rows.
        more: others follow: verdict, page and card wait for the last.

    Raises InputError: `bundle-changed` meanwhile.
    """
    measured, bundle = bundle.manifest.content_sha256, Bundle.load(bundle.path)
    if bundle.manifest.content_sha256 != measured:
        value, rule = bundle.manifest.content_sha256, f"the measured content is {measured}"
        remedy = "measure again while nothing else changes the bundle"
        raise InputError("bundle-changed", where=str(bundle.path), value=value, rule=rule, remedy=remedy)
    if not more:
        efficiency.keep([row.as_dict() for row in rows if "emulated" not in row.flags])
    if looked is not None:
        bundle = _with_engine(bundle, looked)
    manifest = bundle.manifest
    original = manifest.model.source.sha256
    if against != original:
        # rows that do not say what they are set against would pass for those of the original
        rows = [row for row in rows if row.baseline is not None]
    file = bundle.path / MEASUREMENTS
    new = {_kind(row, against) for row in rows}
    before = read_rows(file) if file.is_file() else []
    together = [*(row for row in before if _kind(row, original) not in new), *rows]
    files: dict[str, bytes | None] = {MEASUREMENTS: "".join(f"{row.line()}\n" for row in together).encode(), **beside}
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
    devices = by_device(manifest, together)
    with contextlib.suppress(InputError):
        target = target_of(manifest)
        times, here = any(row.name.startswith("latency.") and row.on is None for row in rows), runs_here(target)
        if times and not here:
            progress.note(f"{target.name} is another machine: no verdict follows from what was timed here")
        # what was timed before stands as it was judged then
        counts = here if times else manifest.verdict is not None
        exports = manifest.recipe.get("export") or []
        judged = decide(shown if counts else [], manifest.checks, manifest.layers, target, exports)
        # where it was timed on devices alone, the verdict is that of the last
        on_devices = [device.verdict for device in devices if device.verdict]
        manifest = manifest.model_copy(update={"verdict": judged or next(reversed(on_devices), None)})
    written, missing = documents(manifest, shown, bundle.path, devices)
    for absent in missing:
        progress.note(f"{absent.where}: {absent.reason}")
    bundle.put_all({**files, **written}, verdict=manifest.verdict, checks=manifest.checks, state=manifest.state)


def _with_engine(bundle: Bundle, looked: Inspected) -> Bundle:
    """Put in an engine's report of its layers, in place of earlier knowledge."""
    path, data = engines.stored(looked)
    checks = [check for check in bundle.manifest.checks if check.name != looked.check.name]
    decisions = [taken for taken in bundle.manifest.decisions if taken.code != FALLBACK]
    return bundle.put_all({path: data}, checks=[*checks, looked.check], decisions=[*decisions, *looked.decisions()])


def _judged(manifest: Manifest, rows: Sequence[Row]) -> Manifest:
    """Check the gates against the current measurements; a gate without a row stands as it was judged."""
    order = runtimes_of(manifest)
    known = [row for row in rows if row.runtime in order]
    ordered = sorted(known, key=lambda row: order.index(str(row.runtime))) + [row for row in rows if row not in known]
    gates = Gates.model_validate(manifest.recipe.get("gates") or {})
    checks, _ = judge(gates, ordered)
    named: dict[str, Check] = {check.name: check for check in [*manifest.checks, *checks]}
    failed = any(not check.ok for name, check in named.items() if name.startswith("gate."))
    state = "gate_failed" if failed else "complete"
    decisions = [*still_unjudged(manifest.decisions, checks), *near(gates, ordered)]
    return manifest.model_copy(update={"checks": list(named.values()), "state": state, "decisions": decisions})


def export_of(runtime: str) -> str:
    """Return the export for a runtime: of those that ship, else of the others."""
    names = [*plugins.EXPORTERS.shipped(), *plugins.EXPORTERS.offers()]
    return next(name for name in names if runtime in load_exporter(name).runtimes)


def runtimes_of(manifest: Manifest) -> list[str]:
    """List the runtimes of a bundle's exports, in the order of its recipe."""
    return [reader(name, options or {}) for step in manifest.recipe.get("export", []) for name, options in step.items()]


def options_of(bundle: Bundle, exporter: str) -> dict[str, Any]:
    """Return the exporter's options for a bundle; nothing without such an export."""
    steps = bundle.manifest.recipe.get("export", [])
    return next((dict(step[exporter] or {}) for step in steps if exporter in step), {})


def _kind(row: Row, against: str) -> tuple[Any, ...]:
    """Tell rows of one kind, which replace each other; those against another baseline, in another runtime, or timed on
    another machine stand beside each other. A row without baseline is one against `against`."""
    told = (
        "export",
        "kv_cache",
        "output",
        "surer_than",
        "way",
        "baseline_runtime",
        "floor",
        "task",
        "metric",
        "shots",
        "chat",
    )
    export = tuple(row.settings.get(key) for key in told)
    baseline = row.baseline.subject if row.baseline else against
    device = row.device.id if row.device and is_timing(row) else None
    if row.name.startswith("load."):  # one load stands whole: its rates share a limit and a state of the machine
        return row.on, "load", baseline, row.runtime, device
    # of another number of sequences, or of items, it is the same figure, better or worse known
    known = ("sequences", "lost", "gained", "for_a_point", "same")
    shape = tuple(sorted(item for item in (row.shape or {}).items() if item[0] not in known))
    return row.on, row.name, baseline, row.runtime, export, device, row.batch, shape


def page(
    manifest: Manifest, rows: Sequence[Row], notes: Sequence[str], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[bytes | None, list[Decision]]:
    """Make `report.html`; None, with the reason, where plotly is missing."""
    from quantkit.report.bundle.document import document
    from quantkit.report.kit import html

    try:
        inspected = stored(folder)
        tree = document(manifest, rows, notes, harm=read_harm(folder), engines=inspected, devices=devices)
        return html.page(tree).encode(), []
    except QuantkitError as problem:
        return None, [decision("report", "page-not-made", REPORT, problem.line())]


def documents(
    manifest: Manifest, rows: Sequence[Row], folder: Path, devices: Sequence[DeviceRows] = ()
) -> tuple[dict[str, bytes | None], list[Decision]]:
    """Make page and card of a finished bundle; the page is None where it cannot be made, so that no old one stays."""
    from quantkit.report.bundle import figures
    from quantkit.report.bundle.document import card

    notes = figures.notes(manifest)
    text, missing = page(manifest, rows, notes, folder, devices)
    return {REPORT: text, "README.md": card(manifest, rows, notes).encode()}, missing


def read_harm(folder: Path) -> Harm | None:
    """Read the result of `measurement.accuracy.harm`, as it is kept in a bundle."""
    from pydantic import ValidationError

    try:
        return Harm.model_validate_json(limits.read(folder / HARM))
    except (OSError, ValidationError):
        return None


def with_documents(manifest: Manifest, rows: list[Row], notes: Sequence[str], folder: Path, hashes: Hashes) -> Manifest:
    """Write page and card into a bundle; return the manifest that lists them."""
    from quantkit.report.bundle.document import card

    if manifest.layers or manifest.verdict is not None or any(row.runtime == RUNTIME for row in rows):
        text, missing = page(manifest, rows, notes, folder)
        manifest = manifest.model_copy(update={"decisions": [*manifest.decisions, *missing]})
        if text is not None:
            (folder / REPORT).write_bytes(text)
            manifest = manifest.model_copy(update={"files": inventory(folder, hashes)})
    (folder / "README.md").write_text(card(manifest, rows, notes), encoding="utf-8")
    return manifest.model_copy(update={"files": inventory(folder, hashes)})
