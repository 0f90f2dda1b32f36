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


def compiled(place: Path, name: str, model: str, recipe: str, changes: Sequence[str], scored: int, speed: bool) -> Any:
    """One compile; None, with the reason printed, where it was refused."""
    cache = place / "cache"
    for known in ("states", "float"):
        shutil.rmtree(cache / known, ignore_errors=True)
    asked, answered, out = (place / f"{name}.{kind}" for kind in ("request", "answer", "bundle"))
    request = {"model": model, "recipe": recipe, "changes": list(changes), "out": str(out), "speed": speed}
    request["target"] = TARGETS.get(recipe)
    asked.write_text(json.dumps({**request, **({"scored": scored} if scored else {})}))
    here = Path(__file__).parent
    command = [sys.executable, here / "side.py", here / "compile_side.py", asked, answered]
    done = run(command, env=environment(QUANTKIT_CACHE=str(cache)))
    shutil.rmtree(out, ignore_errors=True)
    if done.status:
        said = done.err.strip().splitlines()
        print(f"{name}: {said[-1][:200] if said else f'ended with status {done.status}'}")
        return None
    found = json.loads(answered.read_text())
    return {**found, "name": name, "recipe": recipe, "changes": list(changes), "scored": scored, "speed": speed}
