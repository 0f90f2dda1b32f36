"""A runner for tests of the way: a stand-in for `quantkit.devices.there`, of the standard library alone.

It answers `rounds` cells, one each `SECONDS`, and goes on where its rows end. `subject` of the job's model says how it
is to misbehave.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 0.05


def main() -> None:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "job.json").read_text())["work"]
    manner = work["ours"]["subject"]
    rows = folder / "rows.jsonl"
    whole = rows.read_bytes().rpartition(b"\n") if rows.exists() else (b"", b"", b"")
    rows.write_bytes(whole[0] + whole[1])
    there = len(rows.read_text().splitlines())
    if manner == "loud":
        print("x" * 100)
    if manner == "leaves":
        # a child in a session of its own, which ends with nobody
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    with rows.open("a") as out:

        def say(line: dict[str, object]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()
            os.fsync(out.fileno())

        for n in range(there, work["rounds"]):
            if manner == "dies" and n == 2:
                print("Segmentation fault")
                os._exit(9)
            if manner == "long-line" and n == 2:
                out.write("[" * (1 << 21) + "\n")
                out.flush()
            if manner == "nonsense" and n == 2:
                out.write("\x1b[2J../../etc/passwd\n")
                out.flush()
            time.sleep(0.5 if manner == "slow" else SECONDS)
            say({"n": n, "kind": "row", "cell": f"cell {n}", "rows": [{"pid": os.getpid()}]})
        if manner == "hangs":
            time.sleep(600)
        say({"n": work["rounds"], "kind": "done"})


main()
