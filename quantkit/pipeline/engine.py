"""One more engine in a bundle that has its network: for the GPU of this machine, or for one that is named.

An engine is tied to a GPU and to the version that built it, so a bundle may have several, and one is made anew where it
no longer loads. The network is content and stays as it is; engines are not, and `content_sha256` is what it was.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measure.size import folder_of
from quantkit.pipeline.progress import Progress
from quantkit.plan import machine

NETWORK = "network.onnx"


def has_network(bundle: Bundle, to: str) -> bool:
    """Whether engines of a bundle are built from a network that it holds."""
    return any(entry.path == f"{folder_of(to)}/{NETWORK}" for entry in bundle.manifest.files)


def here(options: Mapping[str, Any], asked: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """The options with this machine's GPU in place of the target's, where nobody asked for one.

    Args:
        options: of the exporter: the target's, then those that were asked for.
        asked: the latter alone.
        known: compute capabilities that the library builds for ahead of time; empty where it builds for the GPU here.
    """
    gpus, _ = machine.gpus()
    if "sm" in asked or not gpus or (known and str(gpus[0]["sm"]) not in known):
        return dict(options)
    return {**options, "sm": str(gpus[0]["sm"])}


def add_engine(bundle: Bundle, exporter: Any, options: Mapping[str, Any], progress: Progress) -> tuple[Bundle, str]:
    """Build and put in.

    Args:
        bundle: with a network, intact.
        exporter: that builds.
        options: of it.
        progress: told how far the build is.

    Returns:
        (the bundle with it, the engine's path inside).

    Raises:
        InputError: the build's own; `engine-missing`, it was told to build none.
    """
    place = folder_of(exporter.name)
    progress.plan({"build": 60.0})
    home = bundle.path.resolve()
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}-{place}-") as temporary:
        beside = Path(temporary)
        shutil.copytree(
            home / place, beside / place, copy_function=_linked, ignore=shutil.ignore_patterns("*.engine", "sm*.json")
        )
        exporter.build(beside, options, lambda share, words: progress.at("build", share, words))
        made = sorted((beside / place).glob("*.engine"))
        if not made:
            raise InputError(
                "engine-missing",
                where="engine",
                value=options.get("engine"),
                rule="the bundle has the network; what can be added is an engine",
                remedy="leave out engine=false",
            )
        files: dict[str, bytes | None] = {}
        for path in (made[0], made[0].with_suffix(".json")):
            files[f"{place}/{path.name}"] = path.read_bytes()
        # what was found out about an engine of that name was found out about another one
        layers = f"{place}/{made[0].stem}.layers.json"
        if any(entry.path == layers for entry in bundle.manifest.files):
            files[layers] = None
        return bundle.put_all(files), f"{place}/{made[0].name}"


def _linked(source: str, target: str) -> str:
    """A hard link where the file system has them: weights are large, and nothing writes to them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
