"""Measure a bundle by tasks: original and quantized answer the same items, by lm-eval's definitions; a graph's answers
are scored by the user's own function.

All refusals come before the work: tasks, their data, the template and the longest item are known before a model is
opened. Answers are kept as they come (`measurement.tasks.adapter`): a killed run goes on, and the original answers once
for all its bundles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency, one
from quantkit.measurement.rows import Data, Device, Row
from quantkit.pipeline.graphs.bundles import holds_graph
from quantkit.pipeline.measure import MeasuredAgainst, default_runtime, opened_original, original_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import keep
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import LocalAnswers

if TYPE_CHECKING:
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.measurement.accuracy.labelled import About
    from quantkit.measurement.tasks.adapter import RuntimeLM
    from quantkit.measurement.tasks.defined import OpenTask
    from quantkit.measurement.tasks.scored import Score
    from quantkit.model.source.open import Source
    from quantkit.pipeline.sides import BundleSide


@dataclass(frozen=True)
class TaskQuestion:
    """Tasks to measure by.

    Args:
        names: of lm-eval's tasks, or paths of one's own; of a graph, functions: `module:function`, `./x.py:function`.
        data: folder with the items of lm-eval's tasks; None: where lm-eval has them from. Of a graph, the set of
            samples; None: the bundle's own.
        limit: items of each task; None: all.
        chat: whether prompts go through the model's chat template.
        floor: whether the float model answers in the bundle's runtime too.
    """

    names: Sequence[str]
    data: Path | None = None
    limit: int | None = None
    chat: bool = False
    floor: bool = False


@dataclass
class TaskSide:
    """A side that answers: `subject` and `runtime` for rows; `lm` asks it."""

    subject: str
    runtime: str
    answers: Any
    lm: RuntimeLM

    @property
    def model(self) -> Any:
        """Model with the settings, device and versions of the run."""
        return self.answers.scored if isinstance(self.answers, LocalAnswers) else self.answers


def measure_tasks(
    bundle: Bundle,
    question: TaskQuestion,
    baseline: str | None = None,
    progress: Progress | None = None,
    *,
    runtime: str | None = None,
) -> list[Row]:
    """Measure a bundle by tasks; its rows replace those of the same tasks, and items go to `tasks-RUNTIME.jsonl`.

    Raises:
        InputError: `task-unsupported` for a model that is no decoder of text, those of `tasks.defined.opened` and
        `opened_original`, `no-chat-template`, `task-too-long`; of a graph those of `original_of` and
        `outside.function`, and `scorer-failed`. MissingDependency: lm_eval, torch.
    """
    progress = progress or Progress()
    manifest = bundle.manifest
    if holds_graph(bundle):
        return _by_functions(bundle, question, baseline, progress, runtime or default_runtime(bundle))
    if manifest.model.kind != "decoder" or manifest.hears:
        kind = "a model of speech" if manifest.hears else one(manifest.model.kind)
        rule, remedy = "a task asks a decoder of text", "leave --tasks out: `quantkit measure` scores it by its outputs"
        if manifest.model.kind == "encoder":
            remedy = "--calibration ./pairs.tsv instead scores it by recall and nDCG"
        raise InputError("task-unsupported", str(bundle.path), kind, rule, remedy)
    from quantkit.measurement.tasks.defined import opened

    tasks = opened(question.names, question.data)
    runtime = runtime or default_runtime(bundle)
    runner = load_runtime(runtime, where="--runtime")
    folder = runner.folder(bundle)
    runner.demand()
    bundle.demand_writable()
    bundle.demand_intact()
    original = opened_original(bundle, baseline, None)
    if original.stream is None:
        raise MissingDependency("torch", extra="compile", purpose="the original's answers")
    from quantkit.measurement.tasks.scored import TOKENS, answered, build, departed, departures

    sides = _sides(bundle, original, runtime, folder, question, progress)
    build(tasks, sides[0].lm, question.limit, question.chat)
    progress.plan({f"answers {number + 1} of {len(sides)}": 60.0 for number in range(len(sides))})
    scores = [answered(tasks, side.lm) for side in sides]
    rows: list[Row] = []
    lines: list[str] = []
    for task in tasks:
        for other, side in zip(scores[1:], sides[1:], strict=True):
            for before, after in zip(scores[0].get(task.name, ()), other.get(task.name, ()), strict=True):
                rows.append(_row(task, before, after, side, original, question))
                if side is sides[1]:
                    lines += _lines(task, before, after)
        if task.task is None:
            asked = task.prompts[: question.limit]
            texts = [side.lm.continued(asked, question.chat, TOKENS) for side in sides]
            for written, side in zip(texts[1:], sides[1:], strict=True):
                places = departures(texts[0], written)
                about, told = _about(task, len(asked), side, original, question)
                rows.append(departed(places, about, told))
                if side is sides[1]:
                    lines += _texts(task, asked, (texts[0], written), places, side.lm.tokenizer)
    name = f"tasks-{runtime}.jsonl"
    beside = {name: _with_others(bundle.path / name, lines)}
    keep(bundle, rows, None, runtime, original.subject, progress, beside=beside)
    return rows


def _by_functions(
    bundle: Bundle, question: TaskQuestion, baseline: str | None, progress: Progress, runtime: str
) -> list[Row]:
    """Score a graph's answers and the float graph's by functions of the user, on the same samples."""
    from quantkit.measurement.accuracy.labelled import About
    from quantkit.measurement.tasks.defined import OpenTask
    from quantkit.measurement.tasks.scored import Score, rows
    from quantkit.pipeline.graphs.answers import answers
    from quantkit.pipeline.graphs.bundles import runner
    from quantkit.plugins import outside

    plain = [name for name in question.names if ":" not in name]
    if plain or question.chat or question.floor:
        value, rule = plain[0] if plain else "--chat" if question.chat else "--floor", "a graph is scored by a function"
        raise InputError("task-unsupported", f"--tasks for {bundle.path}", value, rule, "name it: ./score.py:function")
    functions = {name: outside.function(name, "--tasks") for name in question.names}
    bundle.demand_writable()
    bundle.demand_intact()
    original = original_of(bundle, baseline, None, None if question.data is None else str(question.data))
    graph, samples = original.graph, original.samples
    assert graph is not None and samples is not None
    samples = samples if question.limit is None else samples.first_of(question.limit)
    sides = [answers(side, samples) for side in (graph.model, runner(bundle, runtime))]
    data = Data(set=samples.name, split=samples.split, sha256=samples.sha256, items=len(samples))
    device, versions = Device.model_validate(machine.device()), machine.versions()
    about = About(bundle.manifest.content_sha256, original.subject, runtime, data, device, versions)
    scored: list[Row] = []
    lines: list[str] = []
    for name, function in functions.items():
        before, after = (Score("mean", _by_function(name, function, side, samples), True) for side in sides)
        task = OpenTask(Path(name).name.replace(".py:", ":"))
        scored.append(rows(before, after, about, {"task": task.name, "metric": "mean"}, [], samples.clusters))
        lines += _lines(task, before, after)
    beside = {(file := f"tasks-{runtime}.jsonl"): _with_others(bundle.path / file, lines)}
    keep(bundle, scored, None, runtime, original.subject, progress, beside=beside)
    return scored


def _by_function(name: str, function: Callable[..., Any], outputs: Mapping[str, Any], samples: InputSet) -> Any:
    """Ask a function of the user for a number of each sample, [n]. Raises InputError `scorer-failed`."""
    import numpy as np

    rule = f"{name} returns a finite number for each of {len(samples)} samples; more is better"
    try:
        values = np.asarray(function(dict(outputs), dict(samples.arrays), samples.labels), np.float64)
    except Exception as problem:  # whatever the user's code raises
        value = f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')[:200]}".removesuffix(": ")
        raise InputError("scorer-failed", "--tasks", value, rule, "correct the function") from None
    if values.shape != (len(samples),) or not np.isfinite(values).all():
        value = f"shape {list(values.shape)}" if values.shape != (len(samples),) else "NaN or infinity"
        raise InputError("scorer-failed", "--tasks", value, rule, "correct the function")
    return values


def _sides(
    bundle: Bundle, original: MeasuredAgainst, runtime: str, folder: Path, question: TaskQuestion, progress: Progress
) -> list[TaskSide]:
    """Prepare the original in torch, the bundle in its runtime, and the float model there; no model is opened yet."""
    from quantkit.model.structure.kinds import positions
    from quantkit.runtimes.torch import RUNTIME as TORCH

    stream, runner = original.stream, load_runtime(runtime)
    assert stream is not None
    source = stream.source
    if question.chat and not source.tokenizer().chat_template:
        rule = "--chat puts prompts into the model's chat template"
        raise InputError("no-chat-template", "--chat", f"{source.name} has none", rule, "leave --chat out")
    context = min(positions(source.config) or 1 << 30, runner.context(folder))

    def told(share: float, words: str) -> None:
        progress.at("answers", share, words)

    known: list[tuple[str, str, Any]] = [
        (original.subject, "torch", LocalAnswers(lambda: stream, lambda: TORCH.writer(source.in_files().path))),
        (bundle.manifest.content_sha256, runtime, _answers(runtime, bundle.path, folder, told)),
    ]
    if question.floor:
        if runner.own is not None:
            known.append((original.subject, runtime, runner.opens_apart(source.in_files().path, told)))
        elif runner.floats is not None:
            floats, _ = original.floats(bundle, runtime)
            reads = load_runtime(runner.floats)
            answers = LocalAnswers(lambda: reads.opens(floats), lambda: reads.writer(floats))
            known.append((original.subject, runner.floats, answers))
        else:
            progress.note(f"no noise floor: the original answers in {runtime} too")
    sides = []
    for number, (subject, name, answers) in enumerate(known):
        stage = f"answers {number + 1} of {len(known)}"

        def tell(done: int, of: int, stage: str = stage, name: str = name) -> None:
            progress.at(stage, done / of, f"{done:,} of {of:,} in {name}")

        sides.append(asked_side(subject, name, answers, source, context, tell))
    return sides


def asked_side(
    subject: str, runtime: str, answers: Any, source: Source, context: int, tell: Callable[[int, int], None]
) -> TaskSide:
    """Prepare a side for questions in the source's tokens, with its answers so far."""
    import torch

    from quantkit.measurement.tasks.adapter import KeptAnswers, RuntimeLM
    from quantkit.runtimes.text import json_or_empty

    key = {
        "model": subject,
        "runtime": runtime,
        "versions": {**machine.versions(), **({} if isinstance(answers, LocalAnswers) else answers.versions)},
        "isa": machine.isa(),
        "threads": torch.get_num_threads(),
    }
    told = json_or_empty(source.path / "generation_config.json").get("eos_token_id", source.config.get("eos_token_id"))
    ends = frozenset(told if isinstance(told, list) else [told]) - {None}
    lm = RuntimeLM(source.tokenizer(), answers, context, KeptAnswers(key), ends, tell)
    return TaskSide(subject, runtime, answers, lm)


def _answers(runtime: str, path: Path, folder: Path, told: Any) -> Any:
    runner = load_runtime(runtime)
    if runner.own is not None:
        return runner.opens_apart(folder, told)
    return LocalAnswers(lambda: runner.open(path), lambda: runner.writer(folder))


def _row(
    task: OpenTask, before: Score, after: Score, side: TaskSide, original: MeasuredAgainst, question: TaskQuestion
) -> Row:
    from quantkit.measurement.tasks.scored import rows

    about, told = _about(task, int(before.values.size), side, original, question)
    return rows(before, after, about, told, task.flags)


def _about(
    task: OpenTask, count: int, side: TaskSide, original: MeasuredAgainst, question: TaskQuestion
) -> tuple[About, dict[str, Any]]:
    """Describe a side for the rows of a task, with their settings."""
    from quantkit.measurement.accuracy.labelled import About

    model, floor = side.model, side.subject == original.subject
    settings = {**dict(model.settings), **({"floor": True, "baseline_runtime": "torch"} if floor else {})}
    versions = {**machine.versions(), **dict(getattr(model, "versions", {}))}
    data = Data(set=task.name, split="eval", sha256=task.sha256, items=count)
    device = Device.model_validate(dict(model.where))
    shots = int(task.task.get_config("num_fewshot") or 0) if task.task is not None else 0
    told = {"task": task.name, "shots": shots, **({"chat": True} if question.chat else {})}
    return About(side.subject, original.subject, side.runtime, data, device, versions, settings), told


def _texts(
    task: OpenTask, prompts: Sequence[str], texts: Sequence[Any], places: Sequence[int | None], tokenizer: Any
) -> list[str]:
    """Write the texts of both sides after each prompt, and the first token at which they differ."""
    rows = zip(prompts, *texts, places, strict=True)
    return [
        json.dumps(
            {
                **{"task": task.name, "item": number, "departs": place, "prompt": prompt},
                **{side: tokenizer.decode(ids) for side, ids in (("original", one), ("value", other))},
            },
            ensure_ascii=False,
        )
        for number, (prompt, one, other, place) in enumerate(rows)
    ]


def beside(a: BundleSide, b: BundleSide) -> list[Row]:
    """Set B's scores against A's, over the items of a task that both answered in one runtime, in the same prompts."""
    from quantkit.measurement.accuracy.labelled import About
    from quantkit.measurement.tasks.scored import SCORE, rows

    names = ("task", "metric", "shots", "chat")

    def scores(side: BundleSide) -> dict[Any, Row]:
        known = (row for row in side.rows if row.name == SCORE and not row.settings.get("floor"))
        return {(row.runtime, row.data and row.data.sha256, *map(row.settings.get, names)): row for row in known}

    before, compared = scores(a), list[Row]()
    for key, row in scores(b).items():
        if key not in before or row.data is None:
            continue
        first, second = _answered(a, before[key]), _answered(b, row)
        if first is None or second is None:
            continue
        count = min(first.values.size, second.values.size)  # a limit takes the first
        data = row.data.model_copy(update={"items": count})
        about = About(b.subject, a.subject, str(row.runtime), data, row.device, row.versions)
        told = {name: value for name in names[:1] + names[2:] if (value := row.settings.get(name)) is not None}
        flags = [flag for flag in row.flags if not flag.startswith("ci95-by-")]
        compared.append(rows(first.first(count), second.first(count), about, told, flags))
    return compared


def _answered(side: BundleSide, row: Row) -> Score | None:
    """Read the items of a score; None where the kept ones are of another run."""
    import numpy as np

    from quantkit.measurement.tasks.scored import Score

    path, metric = side.bundle.path / f"tasks-{row.runtime}.jsonl", str(row.settings["metric"])
    text = limits.read(path, limits.DATA).decode() if path.is_file() else ""
    items = (item for item in map(json.loads, text.splitlines()) if item["task"] == row.settings["task"])
    kept = [(item["original"], item["value"]) for item in items if item.get("metric") == metric]
    if len(kept) != row.n or not np.isclose(sum(value for _, value in kept) / len(kept), row.value or 0.0):
        return None
    return Score(metric, np.array(kept)[:, 0 if side.floating else 1], row.better == "higher")


def _lines(task: OpenTask, before: Score, after: Score) -> list[str]:
    """Write the items of a score: `task`, `metric`, `item`, and the values of both sides."""
    pairs = zip(before.values.tolist(), after.values.tolist(), strict=True)
    return [
        json.dumps({"task": task.name, "metric": after.metric, "item": number, "original": one, "value": other})
        for number, (one, other) in enumerate(pairs)
    ]


def _with_others(path: Path, lines: Sequence[str]) -> bytes:
    """Return the content of a file of items: new ones, and those of tasks that were not asked now."""
    new = {json.loads(line)["task"] for line in lines}
    before = limits.read(path, limits.DATA).decode().splitlines() if path.is_file() else []
    others = [line for line in before if json.loads(line)["task"] not in new]
    return "".join(f"{line}\n" for line in [*others, *lines]).encode()
