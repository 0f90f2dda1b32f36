"""What quantized models keep of the float model's score in one of lm-eval's tasks: recipes of ours, peers' checkpoints.

    python benchmarks/task_recovery.py --task-data DIR --work WORK --recipes int4-best nf4
    python benchmarks/task_recovery.py --task-data DIR --work WORK --peers CHECKPOINTS

All answer the same items in the same prompts. A recipe is compiled with the text that it names, its checkpoint or GGUF
file alone, and answers by `quantkit measure --tasks`; a bundle that stands in WORK is not made again. CHECKPOINTS is a
folder of folders, as `quality_peers.py --keep` leaves them: plain transformers opens each, and computes in float32.
Answers are kept in quantkit's cache: a run that was ended goes on, and a larger `--limit` asks what is new.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness.process import compiled
from harness.record import layout, parsing, record, sha256, show

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.measurement.accuracy.labelled import About
from quantkit.measurement.rows import Data
from quantkit.measurement.tasks.defined import opened
from quantkit.measurement.tasks.scored import answered, build, rows
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.kinds import positions
from quantkit.pipeline.tasks import TaskQuestion, asked_side, measure_tasks
from quantkit.recipe import Recipe
from quantkit.runtimes.generate import LocalAnswers
from quantkit.runtimes.torch import RUNTIME

RECIPES = [
    *("int8-weights", "int8-dynamic", "fp8", "int8", "gguf-q8_0", "gguf-q4_k_m", "gguf-q4_0"),
    *("nf4", "nvfp4", "mxfp4", "int4-best", "int4-symmetric", "awq-int4", "gptq-int4", "int4-fast", "rtn-int4"),
    *("int3-recovered", "int3", "int2-recovered", "int2"),
]
COLUMNS = layout(
    "name | task | metric | n=items:,d | original:.1% | value=quantized:.1% | ratio=recovery:.1% | "
    "ratio_ci95=95 %:.1% | lost:d | gained:d | p_value=McNemar's p:.2g"
)


class Plain:
    """A checkpoint that plain transformers runs, to score."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def scores(self, ids: Any) -> Any:
        """Return a function of a sequence and its places: logits [places, V]."""
        import torch

        with torch.inference_mode():
            logits = self.model(ids).logits
        return lambda index, places: logits[index, places]


def of_recipe(options: Any, recipe: str) -> list[dict[str, Any]]:
    """The rows of a recipe's bundle."""
    out = options.work / recipe
    if not out.exists():
        kept = [{step.name: dict(step.options)} for step in Recipe.load(recipe).export if step.name != "onnx"]
        compiled(options.model, recipe, out, "--no-speed", "--set", f"export={json.dumps(kept)}")
    question = TaskQuestion([options.task], options.task_data, options.limit)
    return [row.as_dict() for row in measure_tasks(Bundle.load(out), question)]


def of_peer(options: Any, folder: Path) -> list[dict[str, Any]]:
    """The rows of a checkpoint that another toolkit made, in plain transformers."""
    source = open_model(options.model)
    context = positions(source.config) or 1 << 30
    task = opened([options.task], options.task_data)
    floats = LocalAnswers(lambda: StreamedModel(source).as_it_runs(), lambda: RUNTIME.writer(source.path))
    theirs = LocalAnswers(lambda: Plain(folder), lambda: RUNTIME.writer(folder))
    subject = sha256(folder / "model.safetensors")
    sides = [
        asked_side(name, way, answers, source, context, lambda done, of: None).lm
        for name, way, answers in ((source.sha256, "torch", floats), (subject, "transformers", theirs))
    ]
    build(task, sides[0], options.limit, False)
    before, after = (answered(task, side)[options.task] for side in sides)
    data = Data(set=options.task, split="eval", sha256=task[0].sha256, items=int(before[0].values.size))
    about = About(subject, source.sha256, "transformers", data, versions=machine.versions())
    return [
        rows(one, other, about, {"task": options.task}, task[0].flags).as_dict()
        for one, other in zip(before, after, strict=True)
    ]


def figures(name: str, row: dict[str, Any], cpu_s: float) -> dict[str, Any]:
    """What the table and the record hold of a row."""
    base, told, shape = row["baseline"], row["settings"], row["shape"]
    return (
        {"name": name, "task": told["task"], "metric": told["metric"], "n": row["n"], "runtime": row["runtime"]}
        | {"original": base["value"], "value": row["value"], "value_ci95": row["ci95"]}
        | {key: base[key] for key in ("ratio", "ratio_ci95", "difference", "difference_ci95", "p_value")}
        | {"lost": shape["lost"], "gained": shape["gained"], "cpu_s": round(cpu_s), "subject": row["subject"]}
    )


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", default="piqa", help="one that asks for the likeliest of choices")
    parser.add_argument("--task-data", type=Path, required=True, help="folder with the task's items")
    parser.add_argument("--limit", type=int, help="items, the first of the task; default: all")
    parser.add_argument("--work", type=Path, required=True, help="folder where bundles stay")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--peers", type=Path, help="folder of checkpoints that other toolkits made of the model")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []

    def add(name: str, made: list[dict[str, Any]], started: float) -> None:
        found.extend(figures(name, row, time.process_time() - started) for row in made)
        print(json.dumps(found[-1]), flush=True)

    for recipe in options.recipes:
        started = time.process_time()
        add(recipe, of_recipe(options, recipe), started)
    for folder in sorted(options.peers.iterdir()) if options.peers else ():
        started = time.process_time()
        add(folder.name.removeprefix(f"{options.model}-"), of_peer(options, folder), started)
    found.sort(key=lambda row: -row["ratio"])
    claim = "no claim: how much of a task's score is left"
    settings = {"model": options.model, "limit": options.limit, "shots": 0}
    record(f"task-recovery-{options.task}-{options.model}", claim, found, settings)
    show(f"{options.task}, {options.model}", [row for row in found if row["metric"] == "acc"], COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
