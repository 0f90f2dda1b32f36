"""A forked program behaves as one of its own: streams, arguments, folder, variables, path, signals, exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest


@pytest.mark.parametrize(
    "program",
    [
        "import sys; print(sys.argv, len(sys.stdin.read())); print('x', file=sys.stderr)",
        "import os, sys; print(os.getcwd(), os.environ['A'], sys.path[0] in ('', os.getcwd()), sys.path[1])",
        "import sys; sys.exit(75)",
        "import sys; sys.exit('words')",
        "raise SystemExit",
        "import os; os._exit(9)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import atexit, threading, time; atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "import tempfile; print(tempfile.gettempdir())",
        "1 / 0",
    ],
)
def test_a_forked_program_is_as_a_fresh_one(program: str, tmp_path: Path) -> None:
    variables = {**os.environ, "A": "b", "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    fresh, light, heavy = (
        subprocess.run(
            [*command, "-c", program, "one", "two"],
            input="abc",
            env=variables,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        )
        for command in ([sys.executable], forked.python(light=True), forked.python())
    )
    for fork in (light, heavy):
        assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
        # a traceback has other lines before its own
        assert fork.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_program(number: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(3))\nprint(flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(forked.python("-c", program), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(20) == 3


def test_a_program_and_its_children_end_with_their_client() -> None:
    program = (
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '60'])\nprint(os.getpid(), flush=True)\nchild.wait()"
    )
    process = subprocess.Popen(forked.python("-c", program), stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    assert process.stdout.read() == b""  # which the sleeping child held open too
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("light", "there"), [(True, "False True"), (False, "True True")])
def test_what_is_imported(light: bool, there: str) -> None:
    done = forked.run("-c", "import sys; print('torch' in sys.modules, 'quantkit.cli' in sys.modules)", light=light)
    assert done.stdout.strip() == there


def test_a_closed_stream_is_none() -> None:
    command = "import subprocess, sys; sys.stderr.write(f'{sys.stdin} {sys.stdout}')"
    shell = ["bash", "-c", '"$@" <&- >&-', "bash", *forked.python("-c", command, light=True)]
    assert subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=True).stderr == "None None"
