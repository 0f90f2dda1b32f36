"""`quantkit measure`: measure a bundle again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import quantkit
from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import BundlePath, Json, On, Runtime, Wheelhouse, batches, demand_device, listed
from quantkit.errors import Inconclusive, InputError, QuantkitError

if TYPE_CHECKING:
    from quantkit.bundle import Bundle, Manifest
    from quantkit.measurement.load import ServerLoad
    from quantkit.measurement.rows import Row
    from quantkit.pipeline.tasks import TaskQuestion


def measure(
    bundle: BundlePath,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="MODEL|BUNDLE", help="Model or bundle to compare with; default: its original model."),
    ] = None,
    runtime: Runtime = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="Calibration set to score on; default: the bundle's own.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Batches to time; default: the target's, up to 32.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=604_800, metavar="S", help="Time for all shapes; default: 300.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time only the few shapes that a compile times.")] = False,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time the bundle against the float model.")] = True,
    on: On = None,
    wheelhouse: Wheelhouse = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --on: measure only the shapes that the bundle lacks.")
    ] = False,
    load: Annotated[
        str | None, typer.Option(metavar="rate=R,R,…", help="Requests a second: load vLLM's server at these rates.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="With --load: tokens of a prompt.")] = 256,
    output: Annotated[int, typer.Option(min=2, metavar="N", help="With --load: tokens of an answer.")] = 128,
    slo: Annotated[
        str | None, typer.Option(metavar="NAME=TIME,…", help="With --load: limits, ttft=500ms,tpot=50ms,e2el=2s.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=4, metavar="N", help="With --load: requests at a rate; default: those of 30 s, 30 or more."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="With --load: load the server that runs there, and keep nothing.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Tasks of lm-eval, or files of one's own (./mine.jsonl); of a graph, a scorer (module:function).",
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --tasks: folder of NAME.jsonl; default: where lm-eval has them from."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="With --tasks: items of each task; default: all.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --tasks: prompts go through the chat template.")] = False,
    floor: Annotated[
        bool, typer.Option("--floor", help="With --tasks: the float model answers in this runtime too.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Score, weigh and time a bundle again, here or on a device; by tasks; or load it in a server."""
    from quantkit.bundle import Decision
    from quantkit.measurement.engine_layers import stored
    from quantkit.measurement.load import ServerLoad
    from quantkit.passes import NOTE
    from quantkit.pipeline.gates import failed_gate
    from quantkit.pipeline.graphs.bundles import holds_graph
    from quantkit.pipeline.measure import default_runtime, measure_bundle, timing_plan
    from quantkit.pipeline.tasks import TaskQuestion
    from quantkit.report.bundle import engine, figures
    from quantkit.report.bundle.document import document
    from quantkit.report.kit.tree import Part
    from quantkit.runtimes import load_runtime

    if tasks is not None:
        asked = {"--calibration": calibration, "--batch": batch, "--seconds": seconds, "--on": on, "--load": load}
        wrong = [name for name, value in {**asked, "--quick": quick, "--resume": resume}.items() if value]
        if wrong:
            rule = "tasks are measured alone, and here; what was answered already is never asked again"
            raise InputError("usage", "--tasks", wrong[0], rule, f"leave {wrong[0]} out")
        return _by_tasks(bundle, TaskQuestion(listed(tasks), task_data, limit, chat, floor), baseline, runtime)
    if task_data or limit or chat or floor:
        rule = "--task-data, --limit, --chat and --floor need --tasks"
        raise InputError("usage", "--tasks", "not given", rule, "add --tasks piqa,hellaswag")
    if load is not None:
        asked = {"--calibration": calibration, "--batch": batch, "--seconds": seconds, "--quick": quick}
        asked |= {"--on": on} if endpoint else {}
        wrong = [name for name, value in {**asked, "--no-speed": not speed, "--resume": resume}.items() if value]
        if wrong or runtime not in (None, "vllm"):
            value = wrong[0] if wrong else f"--runtime {runtime}"
            raise InputError("usage", "--load", value, "a load is measured in vLLM's server, and alone")
        demand_device(on, wheelhouse)
        of = ServerLoad.parse(load, slo, prompt=prompt, output=output, requests=requests or 0)
        return _loaded(bundle, of, baseline, endpoint, on, wheelhouse)
    if slo or requests or endpoint:
        rule = "--slo, --requests and --endpoint need --load"
        raise InputError("usage", "--load", "not given", rule, "add --load rate=1,2,4")
    demand_device(on, wheelhouse)
    if resume and on is None:
        raise InputError("usage", "--resume", "no --on", "a measurement here is never resumed")
    opened = quantkit.load(bundle)
    chosen = runtime or default_runtime(opened)
    known = load_runtime(chosen, where="--runtime")
    if holds_graph(opened) and not known.graph:
        rule = "the runtime has to run graphs"
        raise InputError("runtime-unsupported", "--runtime", chosen, rule, f"use {default_runtime(opened)}")
    plan = timing_plan(opened, few=quick, batches=batches(batch), seconds=seconds)
    decisions: list[Decision] = []
    with showing() as progress:
        progress.begin(f"measuring {bundle}")
        if on is None:
            rows = measure_bundle(
                opened,
                baseline,
                progress,
                runtime=chosen,
                calibration=calibration,
                plan=plan,
                speed=speed,
                decisions=decisions,
            )
        else:
            from quantkit.devices.measure import measure_on
            from quantkit.devices.named import reach

            with reach(on, wheelhouse=wheelhouse, runtimes=[chosen]) as device:
                rows = measure_on(
                    opened,
                    device,
                    baseline,
                    progress,
                    runtime=chosen,
                    calibration=calibration,
                    plan=plan,
                    speed=speed,
                    resume=resume,
                    decisions=decisions,
                )
    opened = quantkit.load(bundle)
    notes = figures.notes(opened.manifest)
    notes += [f"{x.where}: {figures.change(x)}; {x.reason}" for x in decisions if x.code != NOTE]
    manifest = opened.manifest if on is None else on_device(opened, rows)
    verdict = manifest.verdict
    result: dict[str, Any] = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "verdict": verdict.model_dump(mode="json") if verdict else None,
        "measurements": [row.as_dict() for row in rows],
    }
    error: QuantkitError | None = failed_gate(opened.manifest)
    if (
        error is None
        and verdict is not None
        and verdict.answer == "inconclusive"
        and any(row.name.startswith("latency.") for row in rows)
    ):
        error = Inconclusive(
            "inconclusive",
            str(bundle),
            "; ".join(verdict.because),
            "the interval, this machine's noise included, has to lie above or below 1",
            f"measure again on a quieter machine, or for longer: --seconds {3 * plan.seconds:g}",
        )
    shown: list[Part] = [document(manifest, rows, notes, path=opened.path, whole=False)]
    if chosen.startswith("tensorrt"):
        for engine_layers in stored(opened.path):
            result.setdefault("engines", []).append(engine_layers.model_dump(mode="json"))
            shown += engine.brief(engine_layers)
    taken = [decision.as_dict() for decision in decisions]
    return Answer(result, shown, taken, notes, error)


def _by_tasks(path: Path, question: TaskQuestion, baseline: str | None, runtime: str | None) -> Answer:
    """Measure a bundle by tasks, beside its original."""
    from quantkit.pipeline.gates import failed_gate
    from quantkit.pipeline.tasks import measure_tasks
    from quantkit.report.bundle import tasks as report

    opened = quantkit.load(path)
    with showing() as progress:
        progress.begin(f"measuring {path}")
        rows = measure_tasks(opened, question, baseline, progress, runtime=runtime)
    opened = quantkit.load(path)
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "measurements": [row.as_dict() for row in rows],
    }
    return Answer(result, report.parts(rows), error=failed_gate(opened.manifest))


def _loaded(
    path: Path, load: ServerLoad, baseline: str | None, endpoint: str | None, on: str | None, wheelhouse: Path | None
) -> Answer:
    """Load a bundle beside its original, here or on a device, or an endpoint."""
    from quantkit.devices.measure import loaded_on
    from quantkit.devices.named import reach
    from quantkit.measurement.load import outcome
    from quantkit.pipeline.load import load_bundle, load_endpoint
    from quantkit.report.bundle import load as report

    opened = quantkit.load(path)
    with showing() as progress:
        progress.begin(f"loading {endpoint or path}")
        if on is not None:
            with reach(on, wheelhouse=wheelhouse, runtimes=["vllm"]) as device:
                rows = load_bundle(opened, load, baseline, progress, partial(loaded_on, device))
        elif endpoint is None:
            rows = load_bundle(opened, load, baseline, progress)
        else:
            rows = load_endpoint(opened, load, endpoint, progress)
    opened, judged = quantkit.load(path), outcome(rows)
    error = None
    if judged is not None and judged.better is None:
        rule = "one interval lies above the other"
        error = Inconclusive("inconclusive", str(path), judged.text, rule, judged.remedy)
    verdict = opened.manifest.verdict if on is None else on_device(opened, rows).verdict
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "verdict": verdict.model_dump(mode="json") if verdict else None,
        "load": judged.text if judged else None,
        "measurements": [row.as_dict() for row in rows],
    }
    return Answer(result, report.parts(opened.manifest, rows), error=error)


def on_device(bundle: Bundle, rows: Sequence[Row]) -> Manifest:
    """Return the manifest with the verdict of the rows' device, as the bundle has it now."""
    from quantkit.measurement.rows import Row
    from quantkit.pipeline.verdict import by_device

    name = next((row.on for row in rows), None)
    verdicts = by_device(bundle.manifest, [Row.model_validate(row) for row in bundle.measurements])
    verdict = next((entry.verdict for entry in verdicts if entry.name == name), None)
    return bundle.manifest.model_copy(update={"verdict": verdict})
