"""One model after another in vLLM, each in a fork of a process that has imported it: a refusal leaves nothing behind.

request: {"program": runtimes/vllm/inside.py, "environment": {...}, "jobs": [job of `logits`, ...]}
answer:  [{"model": about, "reason": "", "error": ""}, ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

SECONDS = 400


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ.update(request["environment"])
    sys.path.append(str(Path(request["program"]).parent))
    import inside
    import vllm  # noqa: F401 (imported once, before the forks)

    inside.ANSWERS = Path(os.devnull).open("w")  # noqa: SIM115 (open to the end)
    return [_answer(inside, job) for job in request["jobs"]]


def _answer(inside: Any, job: dict[str, Any]) -> dict[str, Any]:
    place = Path(job["folder"])
    if not (done := place / "answer.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        if (child := os.fork()) == 0:
            _work(inside, job, done)
        _, status = os.waitpid(child, 0)
        if not done.exists():
            done.write_text(json.dumps({"reason": f"its process ended with status {status}", "error": "crash"}))
        print(place.name, done.read_text()[:300], flush=True)
    answer: dict[str, Any] = json.loads(done.read_text())
    return answer


def _work(inside: Any, job: dict[str, Any], done: Path) -> None:
    signal.alarm(SECONDS)
    answer: dict[str, Any] = {"reason": "", "error": ""}

    def say(kind: str, what: Any, share: float = 0.0) -> None:
        if kind == "row" and "model" in what:
            answer.update(what)

    try:
        inside.logits(job, say)
    except Exception as problem:
        answer |= {"reason": inside._line(problem), "error": type(problem).__name__}
    done.write_text(json.dumps(answer))
    os._exit(0)
