"""Choose the engine of a bundle for this machine; nothing of it is executed before all checks pass.

An engine is executable code. The checks, in this order:

    listed       the manifest lists every file of `engine/`, and each has its hash (`hash-mismatch`)
    described    `smNN.json` beside `smNN.engine` states what built it (`engine-unreadable`)
    matching     library, its version, compute capability, and for an engine that was built on a GPU, its name
    hashed       the bytes given to the library have the listed hash: a file may change after a check

In a bundle that is being built, the build provides the hashes.

Drivers need not match: a newer one runs engines made under an older one ("CUDA Compatibility"), and the library
reports a driver that is too old ("Engine Compatibility", TensorRT-RTX). But TensorRT has chosen its kernels by their
times under the driver of the build, so another driver is reported (`EngineFile.notes`).
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
# oldest GPUs that an engine built for several kinds runs on
_AMPERE = (8, 0)
REBUILD = "quantkit export {bundle} --to tensorrt"


class Description(Bounded):
    """Fields of `smNN.json` that a loader needs; the other keys are the exporter's.

    Args:
        library, version: library that built it.
        sm: compute capabilities that it supports.
        gpu, driver: GPU and driver of the build; empty for an engine built ahead of time.
        options: options of the builder that were applied.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    library: str
    version: str
    sm: list[str]
    gpu: str = ""
    driver: str = ""
    options: dict[str, Any] = Field(default={})

    def may(self, option: str) -> bool:
        """Tell whether it was built with `version_compatible` or `hardware_compatible`; only TensorRT has them."""
        return self.library == "tensorrt" and bool(self.options.get(option))


@dataclass(frozen=True)
class EngineFile:
    """One verified engine.

    Args:
        path: path of the engine.
        sha256: expected hash of its bytes.
        described: content of its `smNN.json`.
        sm: compute capability of the GPU that loads it.
        gpu, driver: name of that GPU, and the version of its driver.
    """

    path: Path
    sha256: str
    described: Description
    sm: str
    gpu: str
    driver: str = ""

    @property
    def notes(self) -> list[str]:
        """Facts for the user before it runs."""
        built = self.described.driver
        if not built or not self.driver or built == self.driver:
            return []
        note = f"{self.path.name} was built under driver {built}, and this is {self.driver}"
        again = REBUILD.format(bundle=self.path.parent.parent) + f" --set library={self.described.library}"
        if _numbers(self.driver) < _numbers(built):
            return [f"{note}, which is older: update it, or build anew: {again}"]
        return [f"{note}: it runs, with the kernels that were fastest there; to choose them anew: {again}"]

    def read(self) -> bytes:
        """Read the engine. Raises InputError `hash-mismatch` if the bytes differ from the verified ones."""
        return _read(self.path, self.sha256)


def matching(bundle: Path, files: Mapping[Path, str], library: Versioned, gpu: Mapping[str, Any]) -> EngineFile:
    """Choose the engine for this GPU.

    Args:
        files: engines and their descriptions with hashes, as `verified` returns them.
        gpu: entry of `machine.gpus()`.

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
    """Read the descriptions of all engines in a folder, without verifying them.

    Raises:
        InputError: `engine-unreadable`.
    """
    read = {}
    for path in sorted((bundle / FOLDER).glob("*.engine")):
        record = path.with_suffix(".json")
        read[path] = _described(path, limits.read(record) if record.is_file() else None)
    return read


def choose(bundle: Path, engines: Mapping[Path, Description], library: Versioned, gpu: Mapping[str, Any]) -> Path:
    """Return the first engine for this GPU.

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
    rule = "an engine is loaded by the library that built it, on the GPU that it was built for"
    remedy = f"build one for this GPU: {rebuild(bundle, library)}"
    raise InputError("engine-foreign", where, "; ".join(reasons), rule, remedy)


def verified(bundle: Bundle) -> dict[Path, str]:
    """Compare the files of `engine/` with the manifest and return their hashes.

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
        where, rule = f"{folder}/{strange[0]}", "an engine is executable code, so the manifest must list it"
        remedy = f"delete it, and build again: {REBUILD.format(bundle=bundle.path)}"
        raise InputError("hash-mismatch", where, "files.unlisted", rule, remedy)
    bundle.demand_intact(f"{FOLDER}/")
    return {bundle.path / entry.path: entry.sha256 for entry in listed}


def _missing(bundle: Path) -> InputError:
    value, rule = f"no {FOLDER}/*.engine", "this runtime runs a TensorRT engine"
    remedy = REBUILD.format(bundle=bundle)
    return InputError("bundle-without-engine", str(bundle), value, rule, remedy)


def unreadable(path: Path, why: str, *, update: bool = False) -> InputError:
    """Make the error for an engine that is unchanged and still cannot be used; `update`: the driver is too old."""
    rule = "an engine is loaded by the version that built it, on the GPU that it was built for"
    remedy = f"{'update the driver, or ' * update}build it again: {REBUILD.format(bundle=path.parent.parent)}"
    return InputError("engine-unreadable", str(path), why, rule, remedy)


def _read(path: Path, sha256: str) -> bytes:
    """Read a file and check its hash, so that the checked bytes are the ones used."""
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() == sha256:
        return data
    rule = "an engine is executable code, so the manifest must list it"
    remedy = f"build it again: {REBUILD.format(bundle=path.parent.parent)}"
    raise InputError("hash-mismatch", str(path), "changed since it was verified", rule, remedy)


def _described(path: Path, data: bytes | None) -> Description:
    try:
        return Description.model_validate_json(data or b"")
    except (ValidationError, json.JSONDecodeError):
        raise unreadable(path, f"no {path.with_suffix('.json').name} that says what built it") from None


def _foreign(described: Description, library: Versioned, sm: str, gpu: str) -> str | None:
    """Describe the right machine for an engine if it is not this one; compatible engines also run on later ones."""
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
    """Return the command for building another engine with a library, to be run on the machine with the GPU."""
    return REBUILD.format(bundle=bundle) + ("" if library.ahead_of_time else f" --set library={library.name}")
