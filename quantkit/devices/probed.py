"""Facts that a device states of itself, validated as untrusted data; refusals by them; the wheels that it lacks.

What runs on a device needs a few packages alone, and quantkit's own wheel, made of this checkout or installation. They
are chosen for its platform and its Python by pip, here: from the index that pip is set to, or from a wheelhouse, a
folder of wheels. The device itself needs neither pip nor a network.
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

# what `devices.there` imports; `quantkit`'s own metadata says how recent each has to be
NEEDED = ("numpy", "onnxruntime", "pydantic", "pyyaml")
# seconds that its clock may be off: certificates and the dates in rows hold
_OFF = 86_400.0
# a runtime that lays weights out anew holds them twice while it loads them: as `timing.speed.demand_room` there has it
_TWICE = 2.2
_KINDS: tuple[content.Kind, ...] = ("recipes", "export")
# the oldest C libraries that wheels are built for
_OLDEST = {"x86_64": 5, "aarch64": 17}
# no C library is newer, whatever a device says
_NEWEST = 60
_WHEEL = "Wheel-Version: 1.0\nGenerator: quantkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.]{0,40}(\+[0-9A-Za-z.]{1,40})?")
# a zip has no earlier date, and the same files make the same wheel
_WHEN = (1980, 1, 1, 0, 0, 0)


class Gpu(Closed):
    """A GPU there; `memory` is 0 where it is the machine's."""

    name: Name
    sm: Name
    memory: Bytes
    driver: Name


class Probed(Closed):
    """What a device is.

    Args:
        model: of the board, where its firmware says it.
        isa: best first, as `quantkit doctor` names them.
        memory: bytes that a process may use there.
        disk_free: bytes, where the workdir is or will be.
        libc: `glibc-2.36`; `-` of others.
        packages: of its Python -> version.
        cuda: that its torch is built for; empty where torch is not there, or is built for none.
        triton: whether its Python has that.
        governor: of the clock of its first core.
        temperature: of the hottest zone, degrees Celsius.
        off: seconds that its clock is ahead of ours.
        busy: who has it, and for what; empty where nobody does.
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
    # the second part is counted down to find wheels
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
        """Refuse what no job can run on. Raises InputError `wrong-python`, `clock-off`."""
        if self.implementation != "CPython" or self.bits != 64:
            value = f"{self.implementation} {self.python}, {self.bits} bits"
            rule = "wheels are of CPython, in 64 bits"
            raise InputError("wrong-python", where, value, rule, "name one: --python PATH")
        if abs(self.off) > _OFF:
            value = f"its clock is {abs(self.off) / 86_400:,.0f} days {'ahead' if self.off > 0 else 'behind'}"
            rule = "times and certificates need a clock that is right to a day"
            remedy = "set it there: sudo timedatectl set-ntp true, or sudo date -s"
            raise InputError("clock-off", where, value, rule, remedy)

    def demand_memory(self, models: Iterable[Path], where: str, running: float = 0.0) -> None:
        """Refuse models that do not fit together, before anything is carried there. Raises InputError `out-of-memory`.

        Args:
            models: files of weights, all of them loaded at once.
            running: bytes besides, while they run.
        """
        need = _TWICE * sum(path.stat().st_size for path in models) + running
        self._demand_free(need, "the models", "a smaller model or fewer bits", where)

    def demand_room(self, memory: float, disk: float, what: str, where: str) -> None:
        """Refuse files that do not fit, before any is carried there. Raises InputError `out-of-memory`, `device-full`.

        Args:
            memory: bytes that are held at once.
            disk: bytes of files.
            what: that takes them.
        """
        self._demand_free(memory, what, "smaller shapes (--shape KxN)", where)
        if disk > self.disk_free:
            value = f"{what} are {disk / 1e6:,.0f} MB of files, {self.disk_free / 1e6:,.0f} are free"
            rule, remedy = "what is timed lies on its disk", "fewer shapes or formats, or make room there"
            raise InputError("device-full", where, value, rule, remedy)

    def _demand_free(self, need: float, what: str, remedy: str, where: str) -> None:
        if need > self.memory_free:
            value = f"{what} take about {need / 1e9:.1f} GB there"
            rule = f"{self.memory_free / 1e9:.1f} GB of its {self.memory / 1e9:.1f} are free"
            remedy = f"{remedy}, or another device"
            raise InputError("out-of-memory", where, value, rule, remedy)

    def why_no_kernels(self) -> str:
        """Why quantkit's own kernels do not run on its GPU; empty where they do."""
        if not self.gpus:
            return "it has no NVIDIA GPU"
        if too_old(self.gpus[0].sm):
            return f"it is of SM {self.gpus[0].sm}: {GPUS}"
        if not self.cuda:
            return f"its torch ({self.packages.get('torch', 'none')}) is built without CUDA"
        return "" if self.triton else "its Python has no triton, which compiles the kernels there"

    def demand_gpu(self, need: float, where: str, what: str = "engine") -> None:
        """Refuse what does not fit into the memory of its GPU; one that has none of its own takes the machine's.

        Args:
            need: bytes that are held at once.
            what: is held beside the float model.

        Raises:
            InputError: `gpu-absent`, `out-of-memory`.
        """
        if not self.gpus:
            rule, remedy = "an engine runs on the GPU that it was built for", "another device, or --runtime torch"
            raise InputError("gpu-absent", where, "no NVIDIA GPU", rule, remedy)
        gpu = self.gpus[0]
        if gpu.memory and need > gpu.memory:
            value = f"the {what} and the float model take about {need / 1e9:.1f} GB of its GPU"
            rule = f"{gpu.name} has {gpu.memory / 1e9:.1f} GB"
            remedy = "--no-speed, which does without the float model there, or another device"
            raise InputError("out-of-memory", where, value, rule, remedy)

    def installed(
        self, packages: Iterable[str], where: str, rule: str = "what is gigabytes is not carried"
    ) -> dict[str, str]:
        """Look up what is never carried, as the device has it: package -> version.

        Raises:
            InputError: `runtime-not-here`, it lacks one, or has one too old; `answer-invalid`, a strange version.
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
                rule = "a version is of digits, letters and dots"
                raise InputError("answer-invalid", where, f"{name} {have[name][:80]!r}", rule)
        return {name: have[name] for name in names}


def probe(shell: OpenSSH, workdir: str) -> Probed:
    """Ask a device what it is now.

    Raises:
        InputError: it is not reached, or its answer is none.
        Stopped: the connection broke.
    """
    # packages that rows name, and whatever would be carried there otherwise
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
    return validated(Probed, told, where=shell.name, code="answer-invalid", rule="what a device says")


# --- wheels -----------------------------------------------------------------------------------------------------------


def own_wheel(folder: Path) -> Path:
    """Make quantkit's wheel below a folder: the package as it is imported here, recipes and targets, no calibration
    sets."""
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
    # by its content, and whole: others may carry it just now, and those of another checkout another one
    sha = hashlib.sha256(data.getvalue()).hexdigest()
    made = folder / sha[:16] / f"quantkit-{_version.__version__}-py3-none-any.whl"
    if not made.is_file():
        write_atomic(made, data.getvalue(), inside=folder)
    return made


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so"):
            yield path


def requirements(have: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """List what runs there, and of `more`, that is not there in a version that is recent enough: `numpy>=1.26`."""
    least = dict.fromkeys([*NEEDED, *more], "0")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a clone that is not installed
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
    """List the platforms whose wheels run there, the best first; none where wheels have no name for it."""
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
    """Choose the wheels of what the device lacks: sha256 -> file.

    Args:
        wheelhouse: a folder of wheels; None: they are fetched, and kept in the user's cache.
        where: the device, for errors.
        more: packages besides, of the runtimes that are asked for.
        installed: package -> version of what others need and is not carried: what `Probed.installed` gives.

    Raises:
        InputError: `no-wheel`, there is none for its platform; `missing-pip`.
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
                    if not kept.is_dir():  # else another one that needs the same was first
                        raise
    # quantkit's own is made each time: of a checkout that may have changed
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
        rule = "wheels for a device are chosen by pip, here"
        raise InputError("missing-pip", sys.executable, "no pip", rule, "python -m ensurepip")
    missing = next((line for line in lines if "No matching distribution" in line), lines[-1] if lines else "pip failed")
    raise InputError(
        "no-wheel",
        where,
        missing.removeprefix("ERROR: ")[:200],
        f"there is a wheel for {platforms[0] if platforms else platform.system()} and Python {version}",
        "install the package on the device, in the Python that --python names, where some have to be compiled, "
        "or --wheelhouse with one",
    )


def _stand_in(name: str, version: str, folder: Path) -> str:
    """Make an empty wheel of what the device has, so that pip takes that for what it is and fetches no other; the
    requirement that is this one's alone: no index has a version of this machine's making."""
    stands, plain = f"{version}{'.' if '+' in version else '+'}there", name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{plain}-{stands}-py3-none-any.whl", "w") as wheel:
        about = f"{plain}-{stands}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {stands}\n")
        wheel.writestr(f"{about}/WHEEL", _WHEEL)
        wheel.writestr(f"{about}/RECORD", "")
    return f"{name}=={stands}"


def _used(folder: Path, asked: Sequence[str]) -> list[Path]:
    """The wheels that what is asked for needs there."""
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
