"""One more engine in a bundle that has its network: for the GPU of this machine, or for one that is named.

An engine is tied to a GPU and to the version that built it, so a bundle may have several, and one is made anew where it
no longer loads. The network is content and stays as it is; engines are not, and `content_sha256` is what it was.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import limits, machine
from quantkit.bundle import Bundle, Decision
from quantkit.errors import InputError
from quantkit.exporters.tensorrt import EXPORT as TENSORRT
from quantkit.exporters.tensorrt import timings
from quantkit.measurement.engine_layers import SUFFIX
from quantkit.measurement.size import folder_of
from quantkit.passes import NOTE, decision
from quantkit.pipeline.progress import Progress
from quantkit.runtimes.tensorrt.file import NETWORK


def has_network(bundle: Bundle, to: str) -> bool:
    """Whether engines of a bundle are built from a network that it holds."""
    return any(entry.path == f"{folder_of(to)}/{NETWORK}" for entry in bundle.manifest.files)


def here(
    options: Mapping[str, Any],
    asked: Mapping[str, Any],
    known: list[str],
    gpus: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The options with this machine's GPU in place of the target's, where nobody asked for one.

    Args:
        known: compute capabilities that the library builds for ahead of time; empty where it builds for the GPU here.
        gpus: of another machine, which builds it.
    """
    gpus = machine.gpus()[0] if gpus is None else gpus
    if "sm" in asked or not gpus or (known and str(gpus[0]["sm"]) not in known):
        return dict(options)
    return {**options, "sm": str(gpus[0]["sm"])}


def notes(bundle: Path, built: Iterable[str]) -> list[Decision]:
    """What a reader has to know of builds: what the timing cache has saved."""
    found = []
    for path in sorted(path for path in built if path.endswith(".json")):
        said = timings.said(json.loads(limits.read(bundle / path)))
        if said:
            found.append(decision(TENSORRT.name, NOTE, path.removesuffix(".json") + ".engine", said))
    return found


def add_engine(bundle: Bundle, exporter: Any, options: Any, progress: Progress) -> tuple[Bundle, str, list[Decision]]:
    """Build and put in.

    Returns:
        (the bundle with it, the engine's path inside, what is to be known of its build).

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
        built = exporter.build(beside, options, lambda share, words: progress.at("build", share, words))
        made = next((name for name in built if name.endswith(".engine")), None)
        if made is None:
            raise InputError(
                "engine-missing",
                where="engine",
                value=options.engine,
                rule="the bundle has the network; what can be added is an engine",
                remedy="leave out engine=false",
            )
        said = notes(beside, built)
        return put(bundle, beside, made, built, said), made, said


def put(bundle: Bundle, beside: Path, made: str, built: Iterable[str], said: Iterable[Decision]) -> Bundle:
    """The bundle with an engine that was built.

    Args:
        beside: a folder that is laid out as the bundle is.
        made: the engine's path in both.
        built: that, and the path of what describes it.
        said: of its build; what was said of an earlier one goes.
    """
    whole: dict[str, bytes | None] = {name: (beside / name).read_bytes() for name in built}
    # what was found out about an engine of that name was found out about another one
    layers = made.removesuffix(".engine") + SUFFIX
    if any(entry.path == layers for entry in bundle.manifest.files):
        whole[layers] = None
    kept = [each for each in bundle.manifest.decisions if each.where != made]
    return bundle.put_all(whole, decisions=[*kept, *said])


def _linked(source: str, target: str) -> str:
    """A hard link where the file system has them: weights are large, and nothing writes to them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
