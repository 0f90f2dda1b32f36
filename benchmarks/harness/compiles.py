"""One compile after another, each in a process of its own, part by part."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.process import environment, run

# an engine is built for the GPU of a target, here or elsewhere
TARGETS = {"int4-tensorrt": "rtx-4090"}


def committed(partial: Path) -> int:
    """Steps in the journal of an unfinished build."""
    try:
        return (partial / "steps" / "journal.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def compiled(
    place: Path,
    name: str,
    model: str,
    recipe: str,
    changes: Sequence[str],
    scored: int,
    speed: bool,
    *,
    vllm: bool = True,
    struck: int = 0,
) -> Any:
    """One compile; None, with the reason printed, where it was refused.

    Args:
        struck: steps after which it is killed (SIGKILL), and then resumed; 0 leaves it alone.
    """
    cache = place / "cache"
    for known in ("states", "float"):
        shutil.rmtree(cache / known, ignore_errors=True)
    asked, answered, out = (place / f"{name}.{kind}" for kind in ("request", "answer", "bundle"))
    request = {"model": model, "recipe": recipe, "changes": list(changes), "out": str(out), "speed": speed}
    request |= {"target": TARGETS.get(recipe), "vllm": vllm, **({"scored": scored} if scored else {})}
    here = Path(__file__).parent
    command = [sys.executable, here / "side.py", here / "compile_side.py", asked, answered]
    env, before, reached = environment(QUANTKIT_CACHE=str(cache)), 0.0, 0
    if struck:
        asked.write_text(json.dumps(request))
        partial = out.with_name(f"{out.name}.partial")
        before = run(command, env=env, struck=lambda: committed(partial) >= struck).cpu
        reached = committed(partial)
    asked.write_text(json.dumps({**request, "resume": bool(struck)}))
    done = run(command, env=env)
    shutil.rmtree(out, ignore_errors=True)
    if done.status:
        said = done.err.strip().splitlines()
        print(f"{name}: {said[-1][:200] if said else f'ended with status {done.status}'}")
        return None
    found = json.loads(answered.read_text())
    found |= {"name": name, "recipe": recipe, "changes": list(changes), "scored": scored, "speed": speed}
    return {**found, "process_cpu": before + done.cpu, "process_peak": done.peak, "struck_after": reached}
