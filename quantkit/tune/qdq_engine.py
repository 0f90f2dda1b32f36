"""Placements of Q/DQ pairs measured on the GPU: each is built as an engine, compared and timed."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import content, registry
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.export import _pairs
from quantkit.plan import machine
from quantkit.runtimes._tensorrt_file import FOLDER, NETWORK
from quantkit.tune.qdq import Found, Measured, Report, search

if TYPE_CHECKING:
    from quantkit.runtimes._tensorrt_decode import Loaded

# of the shipped text: tokens that placements are compared on, and steps that are timed
_TOKENS, _STEPS, _BATCH, _CONTEXT = 256, 60, 1, 512
_KL = 0.02
Build = Callable[[Path], "Loaded"]


def autotune(
    bundle: Bundle, options: Mapping[str, Any], *, kl_max: float = _KL, progress: Report | None = None
) -> tuple[Found, list[dict[str, Any]]]:
    """Search on this machine's GPU.

    Args:
        bundle: a decoder's, with `engine/network.onnx`.
        options: of the tensorrt exporter.
        kl_max: what a placement may differ from 16-bit inputs, nats a token; what was compiled is exempt.
        progress: told how far it is.

    Returns:
        (what was found, `overrides` for the recipe).

    Raises:
        InputError: `gpu-absent`, `engine-missing`, `nothing-to-tune`, those of a build.
    """
    exporter = registry.load("export", "tensorrt")
    runtime = registry.load("runtimes", str(options.get("library", "tensorrt_rtx")))
    why = runtime.why_not_here()
    if why is not None:
        raise InputError(
            "gpu-absent",
            where="--autotune-qdq",
            value=why,
            rule="placements are measured on the GPU that runs them",
            remedy="run it there",
        )
    folder = bundle.path / FOLDER
    if not (folder / NETWORK).is_file():
        raise InputError(
            "engine-missing",
            where=str(bundle.path),
            value=f"no {FOLDER}/{NETWORK}",
            rule="pairs are searched in the network that engines are built from",
            remedy=f"quantkit export {bundle.path} --to tensorrt",
        )
    bundle.demand_intact([entry for entry in bundle.manifest.files if entry.path.startswith(f"{FOLDER}/network")])
    gpus, _ = machine.gpus()
    key = json.dumps([bundle.manifest.content_sha256, gpus[0]["name"], runtime.name, dict(options)], sort_keys=True)
    journal = content.cache_dir() / "tune" / f"qdq-{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"

    def build(beside: Path) -> Loaded:
        opened: Loaded = runtime.open(beside, built=exporter.build(beside, options))
        return opened

    groups = _pairs.groups(folder / NETWORK)
    measure = Placements(folder, groups, build, tokens(folder))
    found = search(groups, measure, kl_max=kl_max, journal=journal, progress=progress)
    return found, found.overrides(groups)


def tokens(folder: Path) -> np.ndarray[Any, Any]:
    """Text that may guide a choice, in a bundle's tokens, [1, n]."""
    from quantkit.runtimes._text import Tokenizer

    text = (content.folder("calibration") / "prose-en" / "tune.txt").read_text(encoding="utf-8")
    return np.array([Tokenizer(folder).encode(text[: 8 * _TOKENS])[:_TOKENS]])


class Placements:
    """Measures placements, by the groups that are off.

    Args:
        folder: `engine/` of a bundle.
        groups: of `_pairs.groups`.
        build: makes an engine of a folder that has `engine/network.onnx`, and opens it.
        ids: that they are compared on, [1, T].
        timed: seconds of repeated steps; None: the device's own. For tests.
    """

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, Sequence[str]],
        build: Build,
        ids: np.ndarray[Any, Any],
        timed: Callable[[Loaded], Sequence[float]] | None = None,
    ) -> None:
        self._folder, self._groups, self._build, self._ids = folder, groups, build, ids
        self._timed = timed or _steps
        self._floats: np.ndarray[Any, Any] | None = None

    def __call__(self, off: frozenset[str]) -> Measured:
        """Build, compare, time."""
        if self._floats is None:
            self._floats = self._logits(self._made(frozenset(self._groups))[0])
        model, taken = self._made(off)
        middle = float(np.median(taken))
        # 95 % of a median by its standard error; few steps, so no more is claimed
        spread = 1.96 * 1.2533 * float(np.std(taken)) / max(len(taken), 1) ** 0.5 / middle
        return Measured(middle, spread, _kl(self._floats, self._logits(model)))

    def _made(self, off: frozenset[str]) -> tuple[Loaded, Sequence[float]]:
        with tempfile.TemporaryDirectory(dir=self._folder.resolve().parents[1], prefix=".qdq-") as temporary:
            beside = Path(temporary) / FOLDER
            shutil.copytree(self._folder, beside, ignore=shutil.ignore_patterns("*.engine", "sm*.json"))
            linears = {linear for group in off for linear in self._groups[group]}
            _pairs.without(self._folder / NETWORK, beside / NETWORK, linears)
            model = self._build(Path(temporary))
            return model, self._timed(model)

    def _logits(self, model: Loaded) -> np.ndarray[Any, Any]:
        ids = self._ids[:, : model.capacity]
        return np.asarray(model.run(model.state(1, ids.shape[1]), ids)[0])


def _steps(model: Loaded) -> list[float]:
    step = model.decode(_BATCH, min(_CONTEXT, model.capacity - 1))
    for _ in range(5):
        step()
    return [seconds for _ in range(_STEPS) if (seconds := step()) is not None]


def _kl(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Mean over positions, nats."""
    first, second = (_log_chances(each) for each in (one, other))
    return float((np.exp(first) * (first - second)).sum(axis=-1).mean())


def _log_chances(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
