"""The wheels that a device lacks: quantkit's own, made of this checkout or installation, and what it needs there.

What runs on a device needs a few packages alone. They are chosen for its platform and its Python by pip, here: from the
index that pip is set to, or from a wheelhouse, a folder of wheels. The device itself needs neither pip nor a network.
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
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from quantkit import _version, content, machine
from quantkit.bundle.disk import sha256, write_atomic, writing
from quantkit.devices.probed import NEEDED, Probed, lacking
from quantkit.errors import InputError

_KINDS: tuple[content.Kind, ...] = ("recipes", "export")
# the oldest C libraries that wheels are built for
_OLDEST = {"x86_64": 5, "aarch64": 17}
# no C library is newer, whatever a device says
_NEWEST = 60
_WHEEL = "Wheel-Version: 1.0\nGenerator: quantkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.]{0,40}(\+[0-9A-Za-z.]{1,40})?")
# a zip has no earlier date, and the same files make the same wheel
_WHEN = (1980, 1, 1, 0, 0, 0)


def own(folder: Path) -> Path:
    """quantkit's wheel below a folder: the package as it is imported here, recipes and targets, no calibration sets."""
    root = Path(__file__).parents[1]
    data = io.BytesIO()
    about = f"quantkit-{_version.__version__}.dist-info"
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as made:

        def add(name: str, content: bytes) -> None:
            made.writestr(zipfile.ZipInfo(name, _WHEN), content, zipfile.ZIP_DEFLATED)

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
    wheel = (
        folder / hashlib.sha256(data.getvalue()).hexdigest()[:16] / f"quantkit-{_version.__version__}-py3-none-any.whl"
    )
    if not wheel.is_file():
        write_atomic(wheel, data.getvalue(), inside=folder)
    return wheel


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so"):
            yield path


def requirements(have: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """Of what runs there, and of `more`, what is not there in a version that is recent enough: `numpy>=1.26`."""
    least = dict.fromkeys([*NEEDED, *more], "0")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a clone that is not installed
        for text in importlib.metadata.requires("quantkit") or []:
            found = re.match(r"([a-z0-9-]+)>=([0-9.]+)", text)
            if found and found[1] in least:
                least[found[1]] = found[2]
    return [f"{name}>={version}" for name, version in least.items() if not _recent(have.get(name), version)]


def _recent(version: str | None, least: str) -> bool:
    def parts(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    return version is not None and parts(version) >= parts(least)


def tags(about: Probed) -> list[str]:
    """The platforms whose wheels run there, the best first; none where wheels have no name for it."""
    name, _, version = about.libc.partition("-")
    if about.system == "Linux" and name == "glibc":
        newest = min(int([*version.split("."), "0"][1] or 0), _NEWEST)
        found = [
            f"manylinux_2_{each}_{about.machine}" for each in range(newest, _OLDEST.get(about.machine, 17) - 1, -1)
        ]
        old = ["manylinux2014", *(["manylinux2010", "manylinux1"] if about.machine == "x86_64" else [])]
        return [*found, *(f"{each}_{about.machine}" for each in old), f"linux_{about.machine}"]
    if about.system == "Linux":
        return [*(f"musllinux_1_{each}_{about.machine}" for each in (2, 1)), f"linux_{about.machine}"]
    if about.system == "Darwin":
        return [f"macosx_{each}_0_{about.machine}" for each in range(26, 10, -1)]
    return []


def installed(about: Probed, packages: Iterable[str], where: str) -> dict[str, str]:
    """Package -> version of what is never carried, as the device has it.

    Args:
        where: the device, for errors.

    Raises:
        InputError: `runtime-not-here`, it lacks one, or has one that is too old; `answer-invalid`, a strange version.
    """
    have = {name.lower(): version for name, version in about.packages.items()}
    names = list(dict.fromkeys(packages))
    missing = [each for each in requirements(have, names) if each.partition(">=")[0] in names]
    if missing:
        raise lacking([each.removesuffix(">=0") for each in missing], where, "what is gigabytes is not carried")
    for name in names:
        if not _VERSION.fullmatch(have[name]):
            rule = "a version is of digits, letters and dots"
            raise InputError("answer-invalid", where=where, value=f"{name} {have[name][:80]!r}", rule=rule)
    return {name: have[name] for name in names}


def needed(
    about: Probed,
    *,
    wheelhouse: Path | None,
    where: str,
    more: Iterable[str] = (),
    installed: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """sha256 -> wheel of what the device lacks.

    Args:
        more: packages besides, of the runtimes that are asked for.
        installed: package -> version of what others need and is not carried: what `installed` gives.
        wheelhouse: a folder of wheels; None: they are fetched, and kept in the user's cache.
        where: the device, for errors.

    Raises:
        InputError: `no-wheel`, there is none for its platform; `missing-pip`.
    """
    asked = requirements({name.lower(): version for name, version in about.packages.items()}, more)
    platforms = tags(about)
    named = sorted(path.name for path in wheelhouse.glob("*.whl")) if wheelhouse is not None else []
    there = dict(installed or {})
    key = json.dumps([asked, platforms, about.python, str(wheelhouse), named, there])
    kept = content.cache_dir() / "devices" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not kept.is_dir():
        with writing(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".") as folder:
                fetched = Path(folder) / "wheels"
                fetched.mkdir()
                if asked:
                    _fetch(asked, there, platforms, about.python, wheelhouse, fetched, where)
                used = {path for path in _used(fetched, asked) if _plain(path.name.split("-")[0]) not in there}
                for path in set(fetched.glob("*.whl")) - used:
                    path.unlink()
                try:
                    fetched.rename(kept)
                except OSError:
                    if not kept.is_dir():  # else another one that needs the same was first
                        raise
    # quantkit's own is made each time: of a checkout that may have changed
    mine = content.cache_dir() / "devices" / "own"
    with writing(mine):
        mine.mkdir(parents=True, exist_ok=True)
        made = own(mine)
    return {sha256(path): path for path in [made, *sorted(kept.glob("*.whl"))]}


def _fetch(
    asked: Sequence[str],
    there: Mapping[str, str],
    platforms: Sequence[str],
    python: str,
    wheelhouse: Path | None,
    folder: Path,
    where: str,
) -> None:
    version = ".".join(python.split(".")[:2])
    abi = f"cp{version.replace('.', '')}"
    command = machine.python("-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    command += ["--only-binary=:all:", "--dest", str(folder), "--implementation=cp", f"--python-version={version}"]
    command += [*(f"--abi={each}" for each in (abi, "abi3", "none")), *(f"--platform={each}" for each in platforms)]
    command += [] if wheelhouse is None else ["--no-index", f"--find-links={wheelhouse.absolute()}"]
    with tempfile.TemporaryDirectory(prefix="quantkit-wheels-") as beside:
        stand_ins = [_stand_in(name, version, Path(beside)) for name, version in there.items()]
        command += [f"--find-links={beside}"] if stand_ins else []
        done = subprocess.run(  # noqa: S603
            [*command, *asked, *stand_ins], capture_output=True, text=True, check=False, errors="replace"
        )
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in said):
        rule = "wheels for a device are chosen by pip, here"
        raise InputError("missing-pip", where=sys.executable, value="no pip", rule=rule, remedy="python -m ensurepip")
    missing = next((line for line in said if "No matching distribution" in line), said[-1] if said else "pip failed")
    kind = platforms[0] if platforms else platform.system()
    raise InputError(
        "no-wheel",
        where=where,
        value=missing.removeprefix("ERROR: ")[:200],
        rule=f"there is a wheel for {kind} and Python {version}",
        remedy="install the package on the device, in the Python that --python names, where some have to be compiled, "
        "or --wheelhouse with one",
    )


def _stand_in(name: str, version: str, folder: Path) -> str:
    """An empty wheel of what the device has, so that pip takes that for what it is and fetches no other; the
    requirement that is this one's alone: no index has a version of this machine's making."""
    stands = f"{version}{'.' if '+' in version else '+'}there"
    plain = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{plain}-{stands}-py3-none-any.whl", "w") as made:
        about = f"{plain}-{stands}.dist-info"
        made.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {stands}\n")
        made.writestr(f"{about}/WHEEL", _WHEEL)
        made.writestr(f"{about}/RECORD", "")
    return f"{name}=={stands}"


def _used(folder: Path, asked: Sequence[str]) -> list[Path]:
    """The wheels that what is asked for needs there."""
    wheels = {_plain(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    found, waiting = [], [_plain(re.split(r"[^A-Za-z0-9_.-]", each)[0]) for each in asked]
    while waiting:
        name = waiting.pop()
        path = wheels.pop(name, None)
        if path is None:
            continue
        found.append(path)
        with zipfile.ZipFile(path) as wheel:
            about = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
            head = wheel.read(about).decode("utf-8", "replace").partition("\n\n")[0]
        for needs, marker in re.findall(r"^Requires-Dist:\s*([A-Za-z0-9_.-]+)([^\n]*)", head, re.MULTILINE):
            if "extra ==" not in marker:
                waiting.append(_plain(needs))
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
