"""A runner for tests of the way: a stand-in for `quantkit.runtimes.child`, of the standard library alone.

It answers `rounds` cells, one each `SECONDS`, without those that it is told; `manner` says how it is to misbehave.
"""

import json
import os
import subprocess
import sys
import threading
import time

SECONDS = 0.05


def main(function: str, what: str) -> None:
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    manner, done = told["job"].get("manner", ""), told["cells"]
    if manner == "loud":
        print("x" * 100, file=sys.stderr)
    if manner == "leaves":
        # a child in a session of its own, which ends with nobody
        subprocess.Popen(["sleep", "600"], start_new_session=True)

    def say(kind: str, data: object) -> None:
        print(kind, json.dumps(data), flush=True)

    for n in range(told["job"].get("rounds", 5)):
        if f"cell {n}" in done:
            continue
        if n == 2 and not done:
            if manner == "fails":
                say("error", {"code": "planted", "where": "timing", "exit": 75})
                return
            if manner == "dies":
                print("Segmentation fault", file=sys.stderr, flush=True)
                os._exit(9)
            if manner == "long-line":
                print("row " + "[" * (1 << 21), flush=True)
            if manner == "nonsense":
                print("\x1b[2J../../etc/passwd", flush=True)
            if manner == "nan":
                print('row {"cell": "x", "rows": [{"a": NaN}]}', flush=True)
            if manner == "twice":
                say("row", {"cell": "cell 0", "rows": [{"pid": -1}]})
        time.sleep(0.5 if manner == "slow" else SECONDS)
        print("at", n / told["job"].get("rounds", 5), "words", flush=True)
        say("row", {"cell": f"cell {n}", "rows": [{"pid": os.getpid()}]})
    if manner == "hangs":
        time.sleep(600)


def end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, 9)
