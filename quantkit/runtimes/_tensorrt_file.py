"""Which engine of a bundle runs on this machine; nothing of it is executed before all of this holds.

An engine is executable code. In this order:

    listed       the manifest lists every file of `engine/`, and each is as it says (`hash-mismatch`)
    described    `smNN.json` beside `smNN.engine` says what built it (`engine-unreadable`)
    matching     library, its version, compute capability, and for an engine that was built on a GPU, its name
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes._tensorrt_library import Library

FOLDER = "engine"
REBUILD = "quantkit export {bundle} --to tensorrt"


class Description(BaseModel):
    """`smNN.json`, as far as a loader needs it; other keys are the exporter's.

    Args:
        library, version: that built it.
        sm: compute capabilities that it is for.
        gpu: that it was built on; empty ahead of time.
        options: of the builder.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    library: str
    version: str
    sm: list[str]
    gpu: str = ""
    options: dict[str, Any] = {}


@dataclass(frozen=True)
class EngineFile:
    """One engine, verified.

    Args:
        path: of the engine.
        described: what built it.
        sm: of the GPU that it is loaded on.
        gpu: name of that.
    """

    path: Path
    described: Description
    sm: str
    gpu: str


def matching(engines: Sequence[Path], library: Library, gpu: Mapping[str, Any]) -> EngineFile:
    """The engine for this GPU.

    Args:
        engines: of one bundle, as `verified` gives them.
        library: that is to load it.
        gpu: of `plan.machine.gpus()`.

    Raises:
        InputError: `engine-unreadable`, `engine-foreign`.
    """
    here, name = str(gpu["sm"]), str(gpu["name"])
    reasons = []
    for path in engines:
        described = _described(path)
        reason = _foreign(described, library, here, name)
        if reason is None:
            return EngineFile(path, described, here, name)
        reasons.append(f"{path.name} is for {reason}")
    raise InputError(
        "engine-foreign",
        where=f"{name}, SM {here}, {library.name} {library.version}",
        value="; ".join(reasons) or "no engine",
        rule="an engine is loaded by what built it, on the GPU that it was built for",
        remedy=f"build one for this GPU: {rebuild(engines[0].parent.parent, library) if engines else REBUILD}",
    )


def verified(bundle: Bundle) -> list[Path]:
    """The engines of a bundle, by name; every file of `engine/` is what the manifest says.

    Raises:
        InputError: `bundle-without-engine`, `hash-mismatch`.
    """
    folder = bundle.path / FOLDER
    listed = [entry for entry in bundle.manifest.files if entry.path.startswith(f"{FOLDER}/")]
    engines = [bundle.path / entry.path for entry in listed if entry.path.endswith(".engine")]
    names = {entry.path.removeprefix(f"{FOLDER}/") for entry in listed}
    strange = sorted({path.name for path in folder.glob("*.engine")} - names)
    if not engines and not strange:
        raise InputError(
            "bundle-without-engine",
            where=str(bundle.path),
            value=f"no {FOLDER}/*.engine",
            rule="this runtime runs a TensorRT engine",
            remedy=REBUILD.format(bundle=bundle.path),
        )
    if strange:
        raise InputError(
            "hash-mismatch",
            where=f"{folder}/{strange[0]}",
            value="files.unlisted",
            rule="the manifest lists what is run: an engine is executable code",
            remedy=f"delete it, and build anew: {REBUILD.format(bundle=bundle.path)}",
        )
    bundle.demand_intact(listed)
    return sorted(engines)


def unreadable(path: Path, why: str) -> InputError:
    """The refusal of an engine that is as it was built, and still cannot be used."""
    return InputError(
        "engine-unreadable",
        where=str(path),
        value=why,
        rule="an engine is loaded by the version that built it, on the GPU that it was built for",
        remedy=f"build it anew: {REBUILD.format(bundle=path.parent.parent)}",
    )


def _described(path: Path) -> Description:
    try:
        return Description.model_validate_json(path.with_suffix(".json").read_bytes())
    except (OSError, ValidationError, json.JSONDecodeError):
        raise unreadable(path, f"no {path.with_suffix('.json').name} that says what built it") from None


def _foreign(described: Description, library: Library, sm: str, gpu: str) -> str | None:
    """What an engine is for, where that is not this machine."""
    if described.library != library.name:
        return f"{described.library}, another library"
    if described.version != library.version and not described.options.get("version_compatible"):
        return f"{described.library} {described.version}, another version"
    if sm not in described.sm and not described.options.get("hardware_compatible"):
        return f"SM {', '.join(described.sm) or 'unknown'}"
    if described.gpu and described.gpu != gpu and not described.options.get("hardware_compatible"):
        return f"{described.gpu}, another GPU"
    return None


def rebuild(bundle: Path, library: Library) -> str:
    """The command that builds one more engine with a library, for the GPU of the machine that it is given on."""
    return REBUILD.format(bundle=bundle) + ("" if library.ahead_of_time else f" --set library={library.name}")
