"""Verdicts on many architectures: a process each, with a time limit, so that none can harm the next.

    PYTHONPATH=tests python -m zoo.campaign stream --lines zoo.jsonl --only GPT2LMHeadModel

A line is one verdict; a run goes on where its file of lines ends. `benchmarks/zoo.py` runs and records the whole.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import transformers

from zoo import judge, shrink

PARTS = {"stream": judge.float_stream, "compile": judge.whole_compile, "both": judge.both, "half": judge.half}
SECONDS = 300
# between two looks at what runs; a clock would go on while the machine is suspended
_LOOK = 0.02
# so many are worth an import for all
_MANY = 3


def run(part: str, wanted: Sequence[shrink.Architecture], lines: Path, workers: int) -> list[dict[str, Any]]:
    """Verdicts on all that are wanted; those that `lines` has are not asked for again."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {line["name"] for line in found}
    waiting = [each for each in wanted if each.name not in done]
    if len(waiting) > _MANY:  # once here, for what it imports: every fork has that then, and need not look through it
        PARTS[part](shrink.Architecture("AutoModelForCausalLM", "llama", "LlamaForCausalLM"))
        gc.collect()
        gc.freeze()
    running: list[_Job] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Job(part, waiting.pop(0)))
        for job in [each for each in running if each.ended()]:
            running.remove(job)
            found.append(job.line())
            with lines.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
        time.sleep(_LOOK)
        for job in running:
            job.looks += 1
    names = {each.name for each in wanted}
    return [line for line in found if line["name"] in names]


class _Job:
    """One verdict in the making."""

    def __init__(self, part: str, architecture: shrink.Architecture) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(part, architecture, there))
        self._part, self._architecture, self._began = part, architecture, time.monotonic()
        self.looks = 0
        self._process.start()
        there.close()

    @property
    def _late(self) -> bool:
        return self.looks * _LOOK > SECONDS

    def ended(self) -> bool:
        """Whether there is a verdict, or there will be none."""
        return self._pipe.poll() or self._late or not self._process.is_alive()

    def line(self) -> dict[str, Any]:
        """The verdict; of a process that gave none, that."""
        try:
            found: dict[str, Any] | None = self._pipe.recv() if self._pipe.poll() else None
        except EOFError:
            found = None
        if found is None:
            why = f"longer than {SECONDS} s" if self._late else f"the process died ({self._process.exitcode})"
            found = judge.Verdict.on(self._architecture, self._part, "CRASH", code="no-verdict", line=why).as_dict()
            self._process.kill()
        self._process.join()
        return {**found, "seconds": round(time.monotonic() - self._began, 1)}


def _work(part: str, architecture: shrink.Architecture, pipe: Connection) -> None:
    pipe.send(PARTS[part](architecture).as_dict())


def counts(lines: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Auto class -> verdict -> how many."""
    tables: dict[str, Counter[str]] = {}
    for line in lines:
        tables.setdefault(line["table"], Counter())[line["verdict"]] += 1
    return tables


def chosen(names: Sequence[str]) -> list[shrink.Architecture]:
    """Those of these classes, model types or auto classes; all where none is named."""
    found = shrink.architectures()
    return [each for each in found if not names or {each.name, each.model_type, each.table} & set(names)]


def main() -> None:
    """The command line, for work on a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--lines", type=Path, required=True, help="a verdict a line; those there are not made again")
    parser.add_argument("--only", nargs="*", default=[], help="classes, model types or auto classes")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for table, found in counts(run(options.part, chosen(options.only), options.lines, options.workers)).items():
        print(f"{table}: {found.total()}: {dict(found.most_common())}")


if __name__ == "__main__":
    main()
