"""Runs a part of the campaign over every architecture, a process each with a time limit, and records one line for each.

    python -m zoo.campaign stream --out build/zoo-stream.jsonl [--only NAME ...] [--table TABLE] [--workers 2]

Goes on where a record ends; a line is one verdict.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import transformers

from zoo import judge, shrink

PARTS = {"stream": judge.float_stream, "compile": judge.whole_compile}
SECONDS = 300
WARM = 3


def _work(part: str, architecture: shrink.Architecture, pipe: Any) -> None:
    pipe.send(PARTS[part](architecture).as_dict())


def run(part: str, wanted: list[shrink.Architecture], out: Path, workers: int) -> list[dict[str, Any]]:
    """Verdicts of all; those that `out` has are not made again."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {line["name"] for line in lines}
    waiting = [each for each in wanted if each.name not in done]
    if len(waiting) > WARM:  # once here, for what it imports: every fork has that then
        PARTS[part](shrink.Architecture("AutoModelForCausalLM", "llama", "LlamaForCausalLM"))
        gc.collect()
        gc.freeze()  # a fork that collects garbage need not look through all of that
    context = multiprocessing.get_context("fork")
    running: list[tuple[Any, Any, float, shrink.Architecture]] = []
    while waiting or running:
        while waiting and len(running) < workers:
            architecture = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(part, architecture, there))
            process.start()
            there.close()
            running.append((process, here, time.monotonic(), architecture))
        for job in list(running):
            process, pipe, began, architecture = job
            late = time.monotonic() - began > SECONDS
            if not (pipe.poll() or late or not process.is_alive()):
                continue
            try:
                line = pipe.recv() if pipe.poll() else None
            except EOFError:
                line = None
            if line is None:
                why = f"longer than {SECONDS} s" if late else f"the process died ({process.exitcode})"
                where = (architecture.table, architecture.model_type, architecture.name)
                line = judge.Verdict(*where, part, "CRASH", "late" if late else "died", why).as_dict()
            process.kill() if late else None
            process.join()
            line["seconds"] = round(time.monotonic() - began, 1)
            lines.append(line)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            running.remove(job)
        time.sleep(0.02)
    names = {each.name for each in wanted}
    return [line for line in lines if line["name"] in names]


def summary(lines: list[dict[str, Any]]) -> str:
    """Counts by table."""
    tables: dict[str, Counter[str]] = {}
    for line in lines:
        tables.setdefault(line["table"], Counter())[line["verdict"]] += 1
    return "\n".join(f"{table}: {sum(found.values())}: {dict(found.most_common())}" for table, found in tables.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--table", default="")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    wanted = [
        each
        for each in shrink.architectures()
        if options.table in ("", each.table) and (not options.only or {each.name, each.model_type} & set(options.only))
    ]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(summary(run(options.part, wanted, options.out, options.workers)))


if __name__ == "__main__":
    main()
