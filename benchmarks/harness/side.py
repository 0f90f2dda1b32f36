"""Runs `main` of a script in a process of its own: `python side.py SCRIPT request.json answer.json`."""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    script, asked, answered = (Path(argument) for argument in sys.argv[1:])
    sys.path.insert(0, str(script.parent))
    answer = importlib.import_module(script.stem).main(json.loads(asked.read_text()))
    answered.write_text(json.dumps(answer))
