"""Score a float model by lm-eval's tasks in torch, float32, and record the scores with their intervals.

    python benchmarks/task_scores.py --model smollm2-135m --tasks piqa,hellaswag --task-data DIR

The answers are those that `quantkit measure BUNDLE --tasks` asks of an original: it reuses them.
"""

import argparse
import json
from pathlib import Path

from quantkit import machine
from quantkit.measurement.accuracy.labelled import share_interval
from quantkit.measurement.tasks.defined import opened
from quantkit.measurement.tasks.scored import answered, build
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.kinds import positions
from quantkit.pipeline.tasks import asked_side
from quantkit.runtimes.generate import LocalAnswers
from quantkit.runtimes.torch import RUNTIME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="piqa,hellaswag")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    source = open_model(arguments.model)
    answers = LocalAnswers(lambda: StreamedModel(source).as_it_runs(), lambda: RUNTIME.writer(source.path))
    context = positions(source.config) or 1 << 30

    def tell(done: int, of: int) -> None:
        print(f"{done} of {of}", flush=True)

    side = asked_side(source.sha256, "torch", answers, source, context, tell)
    for name in arguments.tasks.split(","):
        tasks = opened([name], arguments.task_data)
        build(tasks, side.lm, arguments.limit, False)
        for score in answered(tasks, side.lm)[name]:
            low, high = share_interval(score.values > 0)
            row = {"model": arguments.model, "task": name, "metric": score.metric, "n": int(score.values.size)}
            row |= {"value": float(score.values.mean()), "ci95": [low, high], "versions": machine.versions()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
