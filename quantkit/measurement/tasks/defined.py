"""Open tasks by lm-eval's own definitions, on its data or on that of a folder; and tasks of one's own."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.content import is_path
from quantkit.errors import InputError, MissingDependency, reading, unknown_name
from quantkit.measurement.tasks import documents
from quantkit.measurement.tasks.documents import SUFFIX, Line

_OWN: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "expected": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{expected}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@dataclass
class OpenTask:
    """A task with its items.

    Args:
        name: name in rows.
        task: lm-eval's object; None for prompts without a right answer.
        prompts: those prompts.
        sha256: hash of the items.
        flags: for its rows.
    """

    name: str
    task: Any = None
    prompts: Sequence[str] = ()
    sha256: str = ""
    flags: Sequence[str] = field(default_factory=list)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's bars and warnings away from the terminal."""
    import logging

    logger = logging.getLogger("lm_eval")
    before, logger.disabled = logger.disabled, True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = before


def opened(names: Sequence[str], data: Path | None) -> list[OpenTask]:
    """Open tasks by name, or by the path of a task of one's own.

    Args:
        data: folder with the items of lm-eval's tasks; None: where lm-eval has them from.

    Raises:
        MissingDependency: lm_eval. InputError: `unknown-task`, `task-data-missing`, `task-data-invalid`,
        `task-unsupported`.
    """
    with MissingDependency.unless_found("lm_eval", extra="tasks", purpose="a task"), quiet():
        import lm_eval.tasks  # noqa: F401
    if data is not None and not data.is_dir():
        raise InputError("task-data-missing", "--task-data", data, "a folder with a file NAME.jsonl for each task")
    tasks: list[OpenTask] = []
    for name in names:
        if is_path(name) or name.endswith(SUFFIX):
            tasks.append(_own(Path(name).expanduser()))
            continue
        tasks += _defined(_manager(), name, data)
    if len({task.name for task in tasks}) < len(tasks):
        raise InputError("usage", "--tasks", ",".join(names), "every task is asked once")
    return tasks


@cache
def _manager() -> Any:
    """Return lm-eval's definitions, of which the index alone takes seconds."""
    from lm_eval.tasks import TaskManager

    with quiet():
        return TaskManager()


def _own(path: Path) -> OpenTask:
    kind, items = documents.own(path)
    if kind == "open":
        return OpenTask(path.stem, prompts=[item["prompt"] for item in items], sha256=documents.digest(items))
    from lm_eval.api.task import ConfigurableTask

    names = ("question", "choices", "answer") if kind == "choices" else ("prompt", "expected")
    rows = [{name: item[name] for name in names} for item in items]
    config = {"task": path.stem, "test_split": "test", "custom_dataset": _held({"test": rows}), "num_fewshot": 0}
    with quiet():
        task = ConfigurableTask(config={**config, **_OWN[kind]})
    return OpenTask(path.stem, task, sha256=documents.digest(rows))


def _held(splits: dict[str, list[Line]]) -> Any:
    def dataset(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})

    return dataset


def _defined(manager: Any, name: str, data: Path | None) -> list[OpenTask]:
    if name not in manager.all_tasks:
        known = manager.all_subtasks
        raise unknown_name("task", name, known, where="--tasks", more="a task of one's own is a path: ./mine.jsonl")
    several = name not in manager.all_subtasks
    if several and data is not None:
        value, rule = f"{name} is a group of tasks", "with --task-data each task is named"
        raise InputError("task-unsupported", "--tasks", value, rule, "name the tasks of the group")
    asked: Any = name
    flags: list[str] = []
    if data is not None:
        asked, flags = _from_folder(manager, name, data)

    def refused(problem: str) -> InputError:
        rule = "its items come from the hub's data set, or from a folder"
        remedy = f"give a folder with {name}{SUFFIX}: --task-data DIR"
        return InputError("task-data-missing", f"--tasks {name}", problem, rule, remedy)

    if data is not None:

        def refused(problem: str) -> InputError:
            rule = f"{name}{SUFFIX} holds the fields of lm-eval's definition, or a question with choices and an answer"
            return InputError("task-data-invalid", str(data / f"{name}{SUFFIX}"), problem, rule)

    with reading(refused), quiet():
        loaded = manager.load([asked])["tasks"]
    opened = []
    for leaf, task in loaded.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            value = (
                f"{leaf} runs code that a model wrote" if getattr(task, "UNSAFE_CODE", False) else f"{leaf} has images"
            )
            raise InputError("task-unsupported", "--tasks", value, "a task is text, and no code of a model is run")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
        opened.append(OpenTask(leaf, task, sha256=documents.digest(list(task.eval_docs)), flags=flags))
    return opened


def _from_folder(manager: Any, name: str, data: Path) -> tuple[Line, list[str]]:
    """Return a definition with the items of a folder, and flags. Raises InputError `task-data-missing`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index[name]
    config = load_yaml(entry.yaml_path, resolve_func=True, recursive=True)
    if "class" in config:
        value = f"{name} is a program"
        raise InputError(
            "task-unsupported", f"--tasks {name}", value, "with --task-data a task is a definition in YAML"
        )
    split = config.get("test_split") or config.get("validation_split")
    place = data / f"{name}{SUFFIX}"
    if not place.is_file():
        there = ", ".join(sorted(path.name for path in data.glob(f"*{SUFFIX}"))[:8]) or "no .jsonl"
        rule = f"the folder holds {name}{SUFFIX}; it has {there}"
        raise InputError(
            "task-data-missing", f"--tasks {name}", f"no {place}", rule, "add the file, or leave the task out"
        )
    rows, changes, flags = documents.fielded(name, place)
    splits = {split: rows}
    shots = int(config.get("num_fewshot") or 0)
    train = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
    if shots:
        examples = data / f"{name}-train{SUFFIX}"
        if train != split and not examples.is_file():
            value, rule = f"no {examples}", f"{name} shows {shots} examples of its split `{train}`"
            raise InputError("task-data-missing", f"--tasks {name}", value, rule, "add the file, or leave the task out")
        if train != split:
            splits[train] = documents.fielded(name, examples)[0]
    else:
        # a split that is not there must not be asked for
        changes |= {other: None for other in ("training_split", "fewshot_split") if config.get(other) not in splits}
    if config.get("validation_split") not in splits:
        changes["validation_split"] = None
    return {**config, **changes, "task": name, "custom_dataset": _held(splits)}, flags
