"""A runner for tests of the way: a stand-in for `quantkit.devices.there`, of the standard library alone.

It answers `rounds` cells, one each `SECONDS`, and goes on where its rows end; asked to end, it ends as the runner does,
without a word. `subject` of the job's model says how it is to misbehave.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 0.05


def main() -> None:
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    work = json.loads((folder / "job.json").read_text())["work"]
    manner = work["ours"]["subject"]
    rows = folder / "rows.jsonl"
    before = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    there, begin = len(before), sum(line["kind"] == "row" for line in before)
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

        for n, cell in enumerate(range(begin, work["rounds"]), there):
            if manner == "cut-off" and cell == 3 and begin == 0:
                # told, and the machine went off before it was on the disk: of the last line a part
                say({"n": 3, "kind": "progress", "share": 0.5, "words": ""})
                time.sleep(1.0)
                rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:3]) + b'{"n": 3, "ki')
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(10)
            if manner == "fails" and cell == 2 and begin == 0:
                say({"n": 2, "kind": "error", "code": "planted", "where": "timing", "exit": 75})
                os._exit(75)
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
            say({"n": n, "kind": "row", "cell": f"cell {cell}", "rows": [{"pid": os.getpid()}]})
        if manner == "hangs":
            time.sleep(600)
        say({"n": there + work["rounds"] - begin, "kind": "done"})


main()
