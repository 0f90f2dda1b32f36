"""A tiny compile, watched: which package calls into which, and what is entered before `pipeline/compile.py`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import forked

from house.source import PACKAGE

_PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import zoo
from zoo.shrink import tokenizer_of_bytes
from quantkit import cli
from house.falling import floors
from house.source import PACKAGE

tokenizer = tokenizer_of_bytes("<s> $A </s>")
zoo.tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained("model")
tokenizer.save_pretrained("model")
FLOORS = floors()
modules = {{}}
climbs, before, arrived = set(), [], []


def module(code):
    if code not in modules:
        path = Path(code.co_filename)
        own = path.is_relative_to(PACKAGE) and code.co_name != "<module>"
        modules[code] = ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if own else ""
    return modules[code]


def importing(frame):
    # classes and decorators that run while a module is read are no steps of a recipe
    while frame is not None:
        if frame.f_code.co_name == "<module>" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            return True
        frame = frame.f_back
    return False


def entered(frame, event, _):
    if event != "call":
        return
    here = module(frame.f_code)
    if not here or importing(frame):
        return
    there = module(frame.f_back.f_code) if frame.f_back is not None else ""
    if there:
        low, high = (FLOORS.get(name.split(".")[0], len(FLOORS)) for name in (there, here))
        if low < high:
            climbs.add(there + " -> " + here + "." + frame.f_code.co_name)
    if not arrived:
        if here == "pipeline.compile":
            arrived.append(True)
        else:
            before.append(here)


words = "compile ./model --recipe rtn-int4 --no-speed --out out --set scheme.weights.group=32"
sys.setprofile(entered)
code = cli.run(words.split())
sys.setprofile(None)
visits = [name for number, name in enumerate(before) if not number or before[number - 1] != name]
packages = sorted({{name.split(".")[0] for name in before}})
print(json.dumps(dict(code=code, climbs=sorted(climbs), stops=len(visits), packages=packages, arrived=bool(arrived))))
"""


def watched() -> dict[str, object]:
    """What was seen: `climbs`, `stops` and `packages` before the compile itself."""
    program = _PROGRAM.format(tests=str(Path(__file__).parents[1]))
    # in a run of tests a process that has everything imported: what runs while a module is read is not counted
    command = forked.python("-c", program) if forked.SOCKET in os.environ else [sys.executable, "-c", program]
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    seen: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert seen["code"] in {0, 1} and seen["arrived"], done.stderr
    return seen


def walk() -> dict[str, int]:
    """The same, counted."""
    seen = watched()
    names = {"calls that run upward": "climbs", "packages before the compile": "packages"}
    return {**{name: len(seen[key]) for name, key in names.items()}, "stops before the compile": int(seen["stops"])}  # type: ignore[arg-type,call-overload]


if __name__ == "__main__":
    print(json.dumps(watched(), indent=1))
