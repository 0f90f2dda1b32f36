"""What a finished bundle is measured against: the model that it was made from, another model or another bundle."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError, MissingDependency
from quantkit.pipeline import verdict as worth
from quantkit.pipeline.finished.keep import export_of
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel


@dataclass(frozen=True)
class MeasuredAgainst:
    """What a bundle is measured against.

    Args:
        subject: its identity in the rows: of the model that the bundle was made from, the hash of that; else of a
            bundle its `content_sha256`.
        format: of its weights.
        stream: to score against; None where it cannot be had.
        folder: of what the runtime of floats reads, where it has that already.
    """

    subject: str
    format: str
    stream: StreamedModel | None
    folder: Path | None

    def floats_in_torch(self) -> StreamedModel:
        """The float model, which steps on a GPU are timed against. Raises InputError `baseline-needed`."""
        if self.stream is None or self.format != "float32":
            raise InputError(
                "baseline-needed",
                where="--baseline",
                value="another bundle",
                rule="on a GPU times are set against the float model in bfloat16",
                remedy="--baseline MODEL, or --no-speed",
            )
        return self.stream

    def floats(self, bundle: Bundle, runtime: str) -> tuple[Path, str]:
        """The folder of the float model in what a runtime reads, and its format; made if it is not there.

        Raises:
            InputError, GateError: those of `float_export`.
        """
        from quantkit.pipeline.baseline import float_export

        exporter = export_of(runtime)
        if self.folder is not None:
            return self.folder, self.format
        assert self.stream is not None
        options = options_of(bundle, exporter)
        return float_export(self.stream.source, exporter, options), worth.float_format(exporter, options)


def against(bundle: Bundle, baseline: str | None, timed: str | None) -> MeasuredAgainst:
    """Open what the bundle is measured against, and refuse what cannot be.

    Args:
        timed: the runtime that its floats are timed in; None where nothing is timed.

    Raises:
        InputError: `baseline-needed`, `baseline-kind`, `baseline-vocabulary`, `bundle-without-onnx`, `-gguf`,
            `bundle-without-checkpoint`, `hash-mismatch`, those of `open_model`.
        MissingDependency: torch, where nothing can be measured without.
    """
    source = bundle.manifest.model.source
    has_torch = machine.has("torch")
    if baseline is not None and (Path(baseline).expanduser() / MANIFEST).is_file():
        other = Bundle.load(baseline)
        other.demand_intact()
        _demand_alike(bundle, other.manifest.model.kind, config_of(other), baseline)
        from quantkit.runtimes.torch import RUNTIME as TORCH

        checkpoint = (other.model_folder / "config.json").is_file()
        if not timed and has_torch:
            TORCH.folder(other)
        is_original = not other.manifest.layers and other.manifest.model.source.sha256 == source.sha256
        found = MeasuredAgainst(
            source.sha256 if is_original else other.manifest.content_sha256,
            worth.format_of(other.manifest.layers),
            TORCH.stream(other.model_folder) if has_torch and checkpoint else None,
            load_runtime(timed).checked(other) if timed else None,
        )
    elif has_torch:
        from quantkit.model.source.open import open_model
        from quantkit.model.streaming.stream import StreamedModel

        opened = open_model(baseline or _origin(source.ref), trust_remote_code=None)
        _demand_alike(bundle, opened.kind, opened.config, baseline or opened.ref)
        found = MeasuredAgainst(opened.sha256, "float32", StreamedModel(opened), None)
    elif timed:
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value="torch is not installed, so the float model cannot be exported here",
            rule="speed is measured against the float model in the same runtime",
            remedy="--baseline FOLDER of a bundle compiled elsewhere with --recipe float --set "
            f"'export=[{{{export_of(timed)}: {{}}}}]'",
        )
    else:
        found = MeasuredAgainst("", "float32", None, None)
    if not timed and found.stream is None:
        raise MissingDependency("torch", extra="compile", purpose="measuring accuracy")
    return found


def _demand_alike(bundle: Bundle, kind: str, config: dict[str, Any], where: str) -> None:
    """Refuse a baseline that does not do what the bundle does."""
    mine, ours = bundle.manifest.model.kind, config_of(bundle)
    if kind != mine:
        remedy = "the model that the bundle was made from"
        raise InputError("baseline-kind", where=where, value=kind, rule=f"the bundle is {mine}", remedy=remedy)
    sizes = [size for size in (ours.get("vocab_size"), config.get("vocab_size")) if isinstance(size, int)]
    if len(set(sizes)) > 1:
        raise InputError(
            "baseline-vocabulary",
            where=where,
            value=f"{sizes[1]} tokens",
            rule=f"the bundle has {sizes[0]}; two models are compared on the same tokens",
            remedy="the model that the bundle was made from, or one of its family",
        )


def config_of(bundle: Bundle) -> dict[str, Any]:
    """`config.json` of a bundle's model, from whichever export has it; empty where none does."""
    for place in ("model", "onnx"):
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(limits.read(bundle.path / place / "config.json")))
    return {}


def options_of(bundle: Bundle, exporter: str) -> dict[str, Any]:
    """What an exporter was told of the bundle; nothing where it was not asked."""
    for step in bundle.manifest.recipe.get("export", []):
        if exporter in step:
            return dict(step[exporter] or {})
    return {}


def _origin(ref: str) -> str:
    """The reference that opens a bundle's source again."""
    if ref.startswith("path:"):
        raise InputError(
            "baseline-needed",
            where="--baseline",
            value=f"the bundle was made from a folder or file called {ref.removeprefix('path:')!r}",
            rule="a bundle holds no path of the machine it was made on",
            remedy=f"--baseline ./{ref.removeprefix('path:')}, where it lies",
        )
    return ref.removeprefix("alias:")
