"""The campaign of mutants (tests/fuzz), recorded: a million mutants of every kind of file, and what became of each.

python benchmarks/fuzz.py                     14 minutes, guided by coverage where atheris is installed
python benchmarks/fuzz.py --minutes 60 --jobs 2
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.record import parsing, record, show, verdicts

TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--minutes", type=float, default=14)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--outcomes", type=Path, help="of a campaign that ran already")
    options = parser.parse_args()
    guided = importlib.util.find_spec("atheris") is not None
    with tempfile.TemporaryDirectory() as place:
        out = options.outcomes or Path(place) / "outcomes.json"
        if options.outcomes is None:
            command = [sys.executable, "-m", "fuzz.campaign", "--minutes", str(options.minutes), "--out", str(out)]
            command += ["--jobs", str(options.jobs), *(["--guided"] if guided else [])]
            path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
            subprocess.run(command, cwd=TESTS, env={**os.environ, "PYTHONPATH": path}, check=False)
        outcomes = json.loads(out.read_text(encoding="utf-8"))
    rows = [
        {"target": each["target"], "mutants": sum(each["counts"].values()), "clean": each["counts"].get("clean", 0)}
        for each in outcomes
    ]
    show("mutants by target", rows, {"target": "target", "mutants": "mutants:,", "clean": "clean:,"})
    total, clean = (sum(row[key] for row in rows) for key in ("mutants", "clean"))
    examples = [example | {"target": each["target"]} for each in outcomes for example in each["examples"]]
    settings = {"minutes": options.minutes, "jobs": options.jobs, "guided": guided, "not_clean": examples}
    claim = (
        "a mutant of a file is read or refused by a code: no other exception, hang, lack of memory, crash or silence"
    )
    record("fuzz", claim, rows, settings)
    return verdicts(
        {f"{total:,} mutants, a million at least": total >= 1e6, f"{clean:,} of them clean": clean == total}
    )


if __name__ == "__main__":
    raise SystemExit(main())
