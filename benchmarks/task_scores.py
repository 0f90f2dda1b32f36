"""Score a float model by lm-eval's tasks, in torch and in other runtimes.

    python benchmarks/task_scores.py --tasks piqa,hellaswag --task-data DIR          scores in torch, float32
    python benchmarks/task_scores.py ... --against hflm,onnxruntime,llama_cpp --limit 100      item by item

`--against` names other ways to run the same float weights: `hflm` is lm-eval's own model on transformers; a runtime
reads quantkit's export of the floats. Each item is compared: the largest difference of a log-likelihood, and the items
whose score differs, with the distance between the two likeliest answers in torch (a tie is near 0).
`task_recovery.py` scores quantized models.

Answers are kept in quantkit's cache: a run that was killed goes on, and a larger limit asks what is new.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.measurement.accuracy.labelled import share_interval
from quantkit.measurement.tasks.defined import opened
from quantkit.measurement.tasks.scored import answered, build
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.kinds import positions
from quantkit.pipeline.baseline import float_export
from quantkit.pipeline.tasks import asked_side
from quantkit.pipeline.verdict import export_of
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import LocalAnswers
from quantkit.runtimes.torch import RUNTIME

FLOATS = {"gguf": {"floats": "float32"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="piqa,hellaswag")
    parser.add_argument("--task-data", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--against", default="")
    arguments = parser.parse_args()
    names = arguments.tasks.split(",")
    source = open_model(arguments.model)
    context = positions(source.config) or 1 << 30
    answers = LocalAnswers(lambda: StreamedModel(source).as_it_runs(), lambda: RUNTIME.writer(source.path))
    torch = asked_side(source.sha256, "torch", answers, source, context, lambda done, of: None).lm
    others = {way: other(way, source, context) for way in filter(None, arguments.against.split(","))}
    for name in names:
        tasks = opened([name], arguments.task_data)
        build(tasks, torch, arguments.limit, False)
        about = {"model": arguments.model, "task": name, "versions": machine.versions()}
        scores = answered(tasks, torch)[name]
        for score in scores if not others else ():
            low, high = share_interval(score.values > 0)
            row = {"metric": score.metric, "n": int(score.values.size), "value": float(score.values.mean())}
            print(json.dumps({**about, **row, "ci95": [low, high]}), flush=True)
        instances = list(tasks[0].task.instances)
        before = np.array([answer for answer, _ in torch.loglikelihood(instances)])
        items = np.array([instance.doc_id for instance in instances])
        for way, model in others.items():
            started = time.process_time()
            after = np.array([answer for answer, _ in model.loglikelihood(instances)])
            row = {"way": way, "n": len(set(items)), "answers": len(instances), "cpu_s": time.process_time() - started}
            row["largest_nats"] = float(np.abs(after - before).max())
            for score, own in zip(scores, answered(tasks, model)[name], strict=True):
                differ = np.flatnonzero(score.values != own.values)
                ties = {int(item): margin(instances, before, items == item, score.metric) for item in differ}
                values = {"torch": float(score.values.mean()), way: float(own.values.mean())}
                print(json.dumps({**about, **row, "metric": score.metric, **values, "differ": ties}), flush=True)


def margin(instances: list[Any], values: Any, chosen: Any, metric: str) -> float:
    """Return the distance between the two likeliest choices of an item, in nats; of `acc_norm`, per byte."""
    own = values[chosen]
    if metric == "acc_norm":
        own = own / np.array([len(instances[at].args[1].strip()) for at in np.flatnonzero(chosen)])
    best = np.sort(own)[-2:]
    return float(best[1] - best[0])


def other(way: str, source: Any, context: int) -> Any:
    """Open another way to run the float model, with `loglikelihood` as lm-eval has it."""
    if way == "hflm":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=str(source.path), device="cpu", dtype="float32", batch_size=8)
    runtime = load_runtime(way)
    folder = float_export(source, export_of(way), FLOATS.get(export_of(way), {}))
    answers = LocalAnswers(lambda: runtime.opens(folder), lambda: runtime.writer(folder))
    return asked_side(source.sha256, f"{way} float32", answers, source, context, lambda done, of: None).lm


if __name__ == "__main__":
    main()
