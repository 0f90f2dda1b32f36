"""Which engine of a bundle runs on this machine; nothing of it is executed before all of this holds.

An engine is executable code. In this order:

    listed       the manifest lists every file of `engine/`, and each is as it says (`hash-mismatch`)
    described    `smNN.json` beside `smNN.engine` says what built it (`engine-unreadable`)
    matching     library, its version, compute capability, and for an engine that was built on a GPU, its name
    hashed       the bytes that the library is given have the hash that was listed: a file may change after a look at it

In a bundle that is being built the hashes are those that its build has given out.

Drivers are no part of what has to match: a newer one runs what was made under an older ("CUDA Compatibility"), and of
an older one the library says itself whether it is too old ("Engine Compatibility", TensorRT-RTX). But TensorRT has
chosen its kernels by what they took under the driver of the build: another one is said (`EngineFile.notes`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from quantkit import limits
from quantkit.bundle import Bundle
from quantkit.content import Bounded
from quantkit.errors import InputError
from quantkit.runtimes.tensorrt.library import Versioned

FOLDER, NETWORK, DATA = "engine", "network.onnx", "network.onnx.data"
# the least that an engine runs on which was built for others too
_AMPERE = (8, 0)
REBUILD = "quantkit export {bundle} --to tensorrt"


class Description(Bounded):
    """`smNN.json`, as far as a loader needs it; other keys are the exporter's.

    Args:
        library, version: that built it.
        sm: compute capabilities that it is for.
        gpu, driver: that it was built on, and under; empty ahead of time.
        options: of the builder, as far as they were applied.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    library: str
    version: str
    sm: list[str]
    gpu: str = ""
    driver: str = ""
    options: dict[str, Any] = Field(default={})

    def may(self, option: str) -> bool:
        """Whether it was built for others too: `version_compatible`, `hardware_compatible`; TensorRT alone has them."""
        return self.library == "tensorrt" and bool(self.options.get(option))


@dataclass(frozen=True)
class EngineFile:
    """One engine, verified.

    Args:
        path: of the engine.
        sha256: that its bytes have to have.
        described: what built it.
        sm: of the GPU that it is loaded on.
        gpu, driver: name of that, and the version of its driver.
    """

    path: Path
    sha256: str
    described: Description
    sm: str
    gpu: str
    driver: str = ""

    @property
    def notes(self) -> list[str]:
        """What a user has to know before it runs."""
        built = self.described.driver
        if not built or not self.driver or built == self.driver:
            return []
        said = f"{self.path.name} was built under driver {built}, and this is {self.driver}"
        again = REBUILD.format(bundle=self.path.parent.parent) + f" --set library={self.described.library}"
        if _numbers(self.driver) < _numbers(built):
            return [f"{said}, which is older: update it, or build anew: {again}"]
        return [f"{said}: it runs, with the kernels that were fastest there; to choose them anew: {again}"]

    def read(self) -> bytes:
        """The engine. Raises InputError `hash-mismatch`: these bytes are not what was verified."""
        return _read(self.path, self.sha256)


def matching(bundle: Path, files: Mapping[Path, str], library: Versioned, gpu: Mapping[str, Any]) -> EngineFile:
    """The engine for this GPU.

    Args:
        files: engines and what describes them, with their hashes, as `verified` gives them.
        gpu: of `machine.gpus()`.

    Raises:
        InputError: `bundle-without-engine`, `engine-unreadable`, `engine-foreign`, `hash-mismatch`.
    """
    described = {}
    for path in sorted(path for path in files if path.suffix == ".engine"):
        record = path.with_suffix(".json")
        described[path] = _described(path, _read(record, files[record]) if record in files else None)
    path = choose(bundle, described, library, gpu)
    return EngineFile(path, files[path], described[path], str(gpu["sm"]), str(gpu["name"]), str(gpu.get("driver", "")))


def descriptions(bundle: Path) -> dict[Path, Description]:
    """What the engines in a folder say of themselves, for a look alone: nothing here is verified.

    Raises:
        InputError: `engine-unreadable`.
    """
    found = {}
    for path in sorted((bundle / FOLDER).glob("*.engine")):
        record = path.with_suffix(".json")
        found[path] = _described(path, limits.read(record) if record.is_file() else None)
    return found


def choose(bundle: Path, engines: Mapping[Path, Description], library: Versioned, gpu: Mapping[str, Any]) -> Path:
    """The first that is for this GPU.

    Raises:
        InputError: `bundle-without-engine`, `engine-foreign`.
    """
    if not engines:
        raise _missing(bundle)
    here, name = str(gpu["sm"]), str(gpu["name"])
    reasons = []
    for path, described in engines.items():
        reason = _foreign(described, library, here, name)
        if reason is None:
            return path
        reasons.append(f"{path.name} is for {reason}")
    where = f"{name}, SM {here}, {library.name} {library.version}"
    rule = "an engine is loaded by what built it, on the GPU that it was built for"
    remedy = f"build one for this GPU: {rebuild(bundle, library)}"
    raise InputError("engine-foreign", where, "; ".join(reasons), rule, remedy)


def verified(bundle: Bundle) -> dict[Path, str]:
    """The files of `engine/` with their hashes; every one is what the manifest says.

    Raises:
        InputError: `bundle-without-engine`, `hash-mismatch`.
    """
    folder = bundle.path / FOLDER
    listed = [entry for entry in bundle.manifest.files if entry.path.startswith(f"{FOLDER}/")]
    engines = [entry for entry in listed if entry.path.endswith(".engine")]
    names = {entry.path.removeprefix(f"{FOLDER}/") for entry in listed}
    strange = sorted({path.name for path in folder.glob("*.engine")} - names)
    if not engines and not strange:
        raise _missing(bundle.path)
    if strange:
        where, rule = f"{folder}/{strange[0]}", "the manifest lists what is run: an engine is executable code"
        remedy = f"delete it, and build anew: {REBUILD.format(bundle=bundle.path)}"
        raise InputError("hash-mismatch", where, "files.unlisted", rule, remedy)
    bundle.demand_intact(f"{FOLDER}/")
    return {bundle.path / entry.path: entry.sha256 for entry in listed}


def _missing(bundle: Path) -> InputError:
    value, rule = f"no {FOLDER}/*.engine", "this runtime runs a TensorRT engine"
    remedy = REBUILD.format(bundle=bundle)
    return InputError("bundle-without-engine", str(bundle), value, rule, remedy)


def unreadable(path: Path, why: str, *, update: bool = False) -> InputError:
    """The refusal of an engine that is as it was built, and still cannot be used; `update`: with this driver."""
    rule = "an engine is loaded by the version that built it, on the GPU that it was built for"
    remedy = f"{'update the driver, or ' * update}build it anew: {REBUILD.format(bundle=path.parent.parent)}"
    return InputError("engine-unreadable", str(path), why, rule, remedy)


def _read(path: Path, sha256: str) -> bytes:
    """A file's bytes, which have this hash: what is hashed is what is used."""
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() == sha256:
        return data
    rule = "only what the manifest lists is run: an engine is executable code"
    remedy = f"build it anew: {REBUILD.format(bundle=path.parent.parent)}"
    raise InputError("hash-mismatch", str(path), "changed since it was verified", rule, remedy)


def _described(path: Path, data: bytes | None) -> Description:
    try:
        return Description.model_validate_json(data or b"")
    except (ValidationError, json.JSONDecodeError):
        raise unreadable(path, f"no {path.with_suffix('.json').name} that says what built it") from None


def _foreign(described: Description, library: Versioned, sm: str, gpu: str) -> str | None:
    """What an engine is for, where that is not this machine. What is compatible is so with what came later."""
    if described.library != library.name:
        return f"{described.library}, another library"
    later = described.may("version_compatible") and _numbers(described.version) < _numbers(library.version)
    if described.version != library.version and not later:
        return f"{described.library} {described.version}, another version"
    others = described.may("hardware_compatible") and _numbers(sm) >= _AMPERE
    if sm not in described.sm and not others:
        return f"SM {', '.join(described.sm) or 'unknown'}"
    if described.gpu and described.gpu != gpu and not others:
        return f"{described.gpu}, another GPU"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def rebuild(bundle: Path, library: Versioned) -> str:
    """The command that builds one more engine with a library, for the GPU of the machine that it is given on."""
    return REBUILD.format(bundle=bundle) + ("" if library.ahead_of_time else f" --set library={library.name}")
