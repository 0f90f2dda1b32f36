"""Measure a bundle by tasks: original and quantized answer the same items, by lm-eval's definitions.

All refusals come before the work: tasks, their data, the template and the longest item are known before a model is
opened. Answers are kept as they come (`measurement.tasks.adapter`): a killed run goes on, and the original answers once
for all its bundles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency, one
from quantkit.measurement.rows import Data, Device, Row
from quantkit.pipeline.measure import MeasuredAgainst, default_runtime, opened_original
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import keep
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import LocalAnswers

if TYPE_CHECKING:
    from quantkit.measurement.accuracy.labelled import About
    from quantkit.measurement.tasks.adapter import RuntimeLM
    from quantkit.measurement.tasks.defined import OpenTask
    from quantkit.measurement.tasks.scored import Score
    from quantkit.model.source.open import Source


@dataclass(frozen=True)
class TaskQuestion:
    """Tasks to measure by.

    Args:
        names: of lm-eval's tasks, or paths of one's own.
        data: folder with the items of lm-eval's tasks; None: where lm-eval has them from.
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
        `opened_original`, `no-chat-template`, `task-too-long`. MissingDependency: lm_eval, torch.
    """
    progress = progress or Progress()
    manifest = bundle.manifest
    if manifest.model.kind != "decoder" or manifest.hears:
        kind = "a model of speech" if manifest.hears else one(manifest.model.kind)
        rule, remedy = "a task asks a decoder of text", "leave --tasks out: `quantkit measure` scores it by its outputs"
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
