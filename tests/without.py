"""Run programs in a Python without some packages: one process imports the command line and forks for each program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Collection
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

CLI = "from quantkit.cli import main\nmain()"


class Missing:
    """Meta-path finder that hides packages of these names."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Without:
    """A Python without the packages `names`.

    Args:
        names: names of the hidden packages.
        folder: folder for the output of programs.
    """

    def __init__(self, names: Collection[str], folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, __file__, *names]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a program as `python -c` does; `missing.names` are the hidden packages."""
        out, err = self.folder / "out", self.folder / "err"
        argv = ["-c", *map(str, arguments)]
        job = {"program": program, "argv": argv, "out": str(out), "err": str(err)}
        job |= {"environment": dict(os.environ), "folder": str(Path.cwd())}
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())

    def close(self) -> None:
        self.server.communicate(timeout=20)


def _serve(missing: Missing) -> None:
    sys.meta_path.insert(0, missing)
    for module in ("quantkit.cli", "quantkit.report.catalog", "quantkit.report.terminal", "quantkit.pipeline.verdict"):
        import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(job, missing))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(job: dict[str, Any], missing: Missing) -> int:
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, flags, 0o600), number)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["argv"]
    try:
        exec(job["program"], {"__name__": "__main__", "missing": missing})
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve(Missing(sys.argv[1:]))
