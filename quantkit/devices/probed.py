"""Probe a device: its facts, validated as untrusted data; refusals based on them; the wheels that it lacks.

A device needs only a few packages, and quantkit's own wheel, built from this checkout or installation. pip chooses them
here for its platform and Python, from pip's index or from a wheelhouse, a folder of wheels. The device needs neither
pip nor a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from quantkit import _version, content, machine, plugins
from quantkit.bundle.disk import sha256, write_atomic, writing
from quantkit.content import Closed, validated
from quantkit.devices.answers import Bytes, Finite, Name
from quantkit.devices.openssh import OpenSSH, held
from quantkit.errors import InputError
from quantkit.kernels import GPUS, too_old
from quantkit.runtimes import load_runtime

# imports of `devices.there`; quantkit's metadata has their oldest versions
NEEDED = ("numpy", "onnxruntime", "pydantic", "pyyaml")
# most seconds that its clock may be off, for valid certificates and dates in rows
_OFF = 86_400.0
# memory of a load, relative to the files: a runtime that repacks weights holds them twice (`timing.speed.demand_room`)
_TWICE = 2.2
_KINDS: tuple[content.Kind, ...] = ("recipes", "export")
# oldest C library of wheels, by architecture
_OLDEST = {"x86_64": 5, "aarch64": 17}
# newest C library accepted from a device
_NEWEST = 60
_WHEEL = "Wheel-Version: 1.0\nGenerator: quantkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.]{0,40}(\+[0-9A-Za-z.]{1,40})?")
# earliest date of a zip; fixed, so that the same files give the same wheel
_WHEN = (1980, 1, 1, 0, 0, 0)


class Gpu(Closed):
    """A GPU of the device; `memory` is 0 if it shares the machine's."""

    name: Name
    sm: Name
    memory: Bytes
    driver: Name


class Probed(Closed):
    """Facts of a device.

    Args:
        model: name of the board, where the firmware has it.
        isa: instruction sets, best first, named as in `quantkit doctor`.
        memory: bytes that a process may use.
        disk_free: free bytes at the workdir.
        libc: `glibc-2.36`; `-` for others.
        packages: installed package -> version.
        cuda: CUDA version of its torch; empty without torch or CUDA.
        triton: True if triton is installed.
        governor: clock governor of its first core.
        temperature: degrees Celsius of the hottest zone.
        off: seconds that its clock is ahead of ours.
        busy: owner and job; empty if idle.
    """

    host: Name
    system: Name
    release: Name
    machine: Name
    model: Name
    processor: Name
    isa: Annotated[list[Name], Field(min_length=1, max_length=50)]
    cores: Annotated[int, Field(ge=1, le=1 << 16)]
    memory: Bytes
    memory_free: Bytes
    last_level_cache: Bytes | None
    disk_free: Bytes
    python: Annotated[str, Field(pattern=r"^3\.\d{1,3}\.[0-9A-Za-z.+]{1,20}$")]
    implementation: Name
    # the minor version is counted down to find wheels
    libc: Annotated[str, Field(pattern=r"^[a-z]*-(\d{1,2}(\.\d{1,2}){1,3})?$", max_length=40)]
    bits: Annotated[int, Field(ge=1, le=128)]
    packages: Annotated[dict[Name, Name], Field(max_length=100)]
    gpus: Annotated[list[Gpu], Field(max_length=64)]
    cuda: Name = ""
    triton: bool = False
    governor: Name
    temperature: Finite | None
    off: Finite
    busy: Name

    def demand(self, where: str) -> None:
        """Refuse a device unfit for jobs. Raises InputError `wrong-python`, `clock-off`."""
        if self.implementation != "CPython" or self.bits != 64:
            value = f"{self.implementation} {self.python}, {self.bits} bits"
            rule = "a device needs 64-bit CPython"
            raise InputError("wrong-python", where, value, rule, "name another: --python PATH")
        if abs(self.off) > _OFF:
            value = f"its clock is {abs(self.off) / 86_400:,.0f} days {'ahead' if self.off > 0 else 'behind'}"
            rule = "times and certificates need a clock within a day"
            remedy = "set it there: sudo timedatectl set-ntp true, or sudo date -s"
            raise InputError("clock-off", where, value, rule, remedy)

    def demand_memory(self, models: Iterable[Path], where: str, running: float = 0.0) -> None:
        """Refuse models too large together, before anything is carried. Raises InputError `out-of-memory`.

        Args:
            models: files of weights, all loaded at once.
            running: further bytes needed while they run.
        """
        need = _TWICE * sum(path.stat().st_size for path in models) + running
        self._demand_free(need, "the models", "a smaller model or fewer bits", where)

    def demand_room(self, memory: float, disk: float, what: str, where: str) -> None:
        """Refuse files too large for it, before any is carried. Raises InputError `out-of-memory`, `device-full`.

        Args:
            memory: bytes needed at once.
            disk: bytes of files.
            what: name of the files.
        """
        self._demand_free(memory, what, "smaller shapes (--shape KxN)", where)
        if disk > self.disk_free:
            value = f"{what} are {disk / 1e6:,.0f} MB of files, {self.disk_free / 1e6:,.0f} are free"
            rule, remedy = "the files have to fit on its disk", "use fewer shapes or formats, or free space there"
            raise InputError("device-full", where, value, rule, remedy)

    def _demand_free(self, need: float, what: str, remedy: str, where: str) -> None:
        if need > self.memory_free:
            value = f"{what} take about {need / 1e9:.1f} GB there"
            rule = f"{self.memory_free / 1e9:.1f} GB of its {self.memory / 1e9:.1f} are free"
            remedy = f"use {remedy}, or another device"
            raise InputError("out-of-memory", where, value, rule, remedy)

    def why_no_kernels(self) -> str:
        """Return the reason for not running quantkit's kernels on its GPU, or ""."""
        if not self.gpus:
            return "it has no NVIDIA GPU"
        if too_old(self.gpus[0].sm):
            return f"its GPU has SM {self.gpus[0].sm}: {GPUS}"
        if not self.cuda:
            return f"its torch ({self.packages.get('torch', 'none')}) is built without CUDA"
        return "" if self.triton else "its Python has no triton, which compiles the kernels there"

    def demand_gpu(self, need: float, where: str, what: str = "engine") -> None:
        """Refuse files too large for its GPU's memory; a GPU without its own memory uses the machine's.

        Args:
            need: bytes needed at once.
            what: name of the files beside the float model.

        Raises InputError: `gpu-absent`, `out-of-memory`.
        """
        if not self.gpus:
            rule, remedy = "an engine runs only on its own GPU", "use another device, or --runtime torch"
            raise InputError("gpu-absent", where, "no NVIDIA GPU", rule, remedy)
        gpu = self.gpus[0]
        if gpu.memory and need > gpu.memory:
            value = f"the {what} and the float model take about {need / 1e9:.1f} GB of its GPU"
            rule = f"{gpu.name} has {gpu.memory / 1e9:.1f} GB"
            remedy = "--no-speed, which needs no float model there, or another device"
            raise InputError("out-of-memory", where, value, rule, remedy)

    def installed(
        self, packages: Iterable[str], where: str, rule: str = "packages of gigabytes are not carried"
    ) -> dict[str, str]:
        """Look up the device's versions of packages that are never carried: package -> version.

        Raises InputError: `runtime-not-here`, one is missing or too old; `answer-invalid`, a malformed version.
        """
        have = {name.lower(): version for name, version in self.packages.items()}
        names = list(dict.fromkeys(packages))
        missing = [need.removesuffix(">=0") for need in requirements(have, names) if need.partition(">=")[0] in names]
        if missing:
            value = f"its Python has no {' and no '.join(missing)}"
            remedy = f"install {' and '.join(missing)} there, or name the Python that has them: --python PATH"
            raise InputError("runtime-not-here", where, value, rule, remedy)
        for name in names:
            if not _VERSION.fullmatch(have[name]):
                rule = "a version has digits, letters and dots"
                raise InputError("answer-invalid", where, f"{name} {have[name][:80]!r}", rule)
        return {name: have[name] for name in names}


def probe(shell: OpenSSH, workdir: str) -> Probed:
    """Probe a device.

    Raises:
        InputError: it cannot be reached, or its answer is invalid.
        Stopped: the connection broke.
    """
    # packages named in rows, and packages that would be carried otherwise
    runtimes = [load_runtime(name) for name in plugins.RUNTIMES.shipped()]
    packages = {package for runtime in runtimes for package in (*runtime.packages, *runtime.installed)}
    asked = {"machine": Path(machine.__file__).read_text(encoding="utf-8"), "workdir": workdir}
    packages |= {*machine.PACKAGES, *NEEDED}
    answer = shell.call("probe", {**asked, "packages": sorted(packages)}, seconds=60.0)
    there, busy = answer.pop("time", None), answer.get("busy")
    if busy:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            busy = json.loads(busy)
        busy = held(busy)
    told = {**answer, "off": there - time.time() if isinstance(there, float) else None, "busy": busy}
    return validated(Probed, told, where=shell.name, code="answer-invalid", rule="an answer of the probe")


# --- wheels -----------------------------------------------------------------------------------------------------------


def own_wheel(folder: Path) -> Path:
    """Build quantkit's wheel below a folder: the imported package, recipes and targets, without calibration sets."""
    root, data = Path(__file__).parents[1], io.BytesIO()
    about = f"quantkit-{_version.__version__}.dist-info"
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name: str, content: bytes) -> None:
            wheel.writestr(zipfile.ZipInfo(name, _WHEN), content, zipfile.ZIP_DEFLATED)

        for path in _files(root):
            if path.relative_to(root).parts[0] != "content":
                add(f"quantkit/{path.relative_to(root).as_posix()}", path.read_bytes())
        for kind in _KINDS:
            place = content.folder(kind)
            for path in _files(place):
                add(f"quantkit/content/{kind}/{path.relative_to(place).as_posix()}", path.read_bytes())
        add(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: quantkit\nVersion: {_version.__version__}\n".encode())
        add(f"{about}/WHEEL", _WHEEL.encode())
        add(f"{about}/RECORD", b"")
    # named by content and written whole: other processes may be carrying it, or another checkout's
    sha = hashlib.sha256(data.getvalue()).hexdigest()
    file = folder / sha[:16] / f"quantkit-{_version.__version__}-py3-none-any.whl"
    if not file.is_file():
        write_atomic(file, data.getvalue(), inside=folder)
    return file


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so"):
            yield path


def requirements(have: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """List the needed packages, and those of `more`, without a recent enough version there: `numpy>=1.26`."""
    least = dict.fromkeys([*NEEDED, *more], "0")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a clone without an installation
        for text in importlib.metadata.requires("quantkit") or []:
            need = re.match(r"([a-z0-9-]+)>=([0-9.]+)", text)
            if need and need[1] in least:
                least[need[1]] = need[2]
    return [f"{name}>={version}" for name, version in least.items() if not _recent(have.get(name), version)]


def _recent(version: str | None, least: str) -> bool:
    def parts(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    return version is not None and parts(version) >= parts(least)


def tags(about: Probed) -> list[str]:
    """List the platform tags of wheels that run there, best first; empty for an unknown platform."""
    (name, _, version), kind = about.libc.partition("-"), about.machine
    if about.system == "Linux" and name == "glibc":
        newest = min(int([*version.split("."), "0"][1] or 0), _NEWEST)
        new = [f"manylinux_2_{minor}" for minor in range(newest, _OLDEST.get(kind, 17) - 1, -1)]
        old = ["manylinux2014", *(["manylinux2010", "manylinux1"] if kind == "x86_64" else [])]
        return [f"{platform}_{kind}" for platform in (*new, *old, "linux")]
    if about.system == "Linux":
        return [f"{platform}_{kind}" for platform in ("musllinux_1_2", "musllinux_1_1", "linux")]
    return [f"macosx_{major}_0_{kind}" for major in range(26, 10, -1)] if about.system == "Darwin" else []


def wheels(
    about: Probed,
    *,
    wheelhouse: Path | None,
    where: str,
    more: Iterable[str] = (),
    installed: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """Choose wheels for the device's missing packages: sha256 -> file.

    Args:
        wheelhouse: folder of wheels; None fetches them, and keeps them in the user's cache.
        where: device, for errors.
        more: further packages, of the requested runtimes.
        installed: package -> version present there and never carried: result of `Probed.installed`.

    Raises InputError: `no-wheel`, none for its platform; `missing-pip`.
    """
    asked = requirements({name.lower(): version for name, version in about.packages.items()}, more)
    named = sorted(path.name for path in wheelhouse.glob("*.whl")) if wheelhouse is not None else []
    key = json.dumps([asked, tags(about), about.python, str(wheelhouse), named, dict(installed or {})])
    cache = content.cache_dir() / "devices"
    kept = cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not kept.is_dir():
        with writing(kept):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".") as folder:
                fetched = Path(folder) / "wheels"
                fetched.mkdir()
                if asked:
                    _fetch(asked, installed or {}, about, wheelhouse, fetched, where)
                used = _used(fetched, asked)
                for path in fetched.glob("*.whl"):
                    if path not in used or _plain(path.name.split("-")[0]) in (installed or {}):
                        path.unlink()
                try:
                    fetched.rename(kept)
                except OSError:
                    if not kept.is_dir():  # otherwise another process fetched the same first
                        raise
    # quantkit's own wheel is built each time: the checkout may have changed
    with writing(cache / "own"):
        (cache / "own").mkdir(parents=True, exist_ok=True)
        own = own_wheel(cache / "own")
    return {sha256(path): path for path in [own, *sorted(kept.glob("*.whl"))]}


def _fetch(
    asked: Sequence[str], there: Mapping[str, str], about: Probed, wheelhouse: Path | None, folder: Path, where: str
) -> None:
    version, platforms = ".".join(about.python.split(".")[:2]), tags(about)
    command = machine.python("-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    command += ["--only-binary=:all:", "--dest", str(folder), "--implementation=cp", f"--python-version={version}"]
    command += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={name}" for name in platforms]
    command += [] if wheelhouse is None else ["--no-index", f"--find-links={wheelhouse.absolute()}"]
    with tempfile.TemporaryDirectory(prefix="quantkit-wheels-") as beside:
        stand_ins = [_stand_in(name, own, Path(beside)) for name, own in there.items()]
        command += [f"--find-links={beside}"] if stand_ins else []
        done = subprocess.run(  # noqa: S603
            [*command, *asked, *stand_ins], capture_output=True, text=True, check=False, errors="replace"
        )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        rule = "pip chooses a device's wheels here"
        raise InputError("missing-pip", sys.executable, "no pip", rule, "python -m ensurepip")
    missing = next((line for line in lines if "No matching distribution" in line), lines[-1] if lines else "pip failed")
    raise InputError(
        "no-wheel",
        where,
        missing.removeprefix("ERROR: ")[:200],
        f"there is a wheel for {platforms[0] if platforms else platform.system()} and Python {version}",
        "install the package on the device, in the Python of --python (some have to be compiled), "
        "or use a --wheelhouse that has one",
    )


def _stand_in(name: str, version: str, folder: Path) -> str:
    """Build an empty wheel for a package of the device, so that pip fetches no other; return its unique requirement.

    No index has its version, because it is made up here.
    """
    stands, plain = f"{version}{'.' if '+' in version else '+'}there", name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{plain}-{stands}-py3-none-any.whl", "w") as wheel:
        about = f"{plain}-{stands}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {stands}\n")
        wheel.writestr(f"{about}/WHEEL", _WHEEL)
        wheel.writestr(f"{about}/RECORD", "")
    return f"{name}=={stands}"


def _used(folder: Path, asked: Sequence[str]) -> list[Path]:
    """Return the wheels required, directly or not, by the request."""
    files = {_plain(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    used, waiting = [], [_plain(re.split(r"[^A-Za-z0-9_.-]", need)[0]) for need in asked]
    while waiting:
        path = files.pop(waiting.pop(), None)
        if path is None:
            continue
        used.append(path)
        with zipfile.ZipFile(path) as wheel:
            about = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            head = wheel.read(about).decode("utf-8", "replace").partition("\n\n")[0]
        for needs, marker in re.findall(r"^Requires-Dist:\s*([A-Za-z0-9_.-]+)([^\n]*)", head, re.MULTILINE):
            if "extra ==" not in marker:
                waiting.append(_plain(needs))
    return used


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
