"""What is at hand once a request was opened and found good, and all that the content of its bundle depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import Decision
from quantkit.model.device import ComputeDevice
from quantkit.model.source.files import file_sha256
from quantkit.pipeline.blocks.layers import Layers
from quantkit.pipeline.request import Request

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.work import PassRun

# what calibrates (None where no pass looks at data), and what scores
Sets = tuple["TokenSet | None", "TokenSet"]
# packages that an ONNX graph's bytes depend on
_GRAPH = ("onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class Prepared:
    """A request whose every input was opened and found good; nothing has been written.

    Args:
        original: the model as opened.
        source: the same, untied where a pass of scope `model` will make two tensors of a tied one.
        cpu_seconds: processor seconds that passes of scope `model` took to find out what they will do.
        device: where it computes; `stream` is there.
    """

    request: Request
    original: Source
    source: Source
    stream: StreamedModel
    layers: Layers
    steps: list[PassRun]
    calibration: TokenSet | None
    scoring: TokenSet
    out: Path
    decisions: list[Decision]
    cpu_seconds: float = 0.0
    device: ComputeDevice = field(default_factory=ComputeDevice)

    def unchanged(self) -> StreamedModel:
        """The model as it was opened, without what passes of scope `model` make of it."""
        from quantkit.model.streaming.stream import StreamedModel

        return self.placed(StreamedModel(self.original)) if self.stream.transforms else self.stream

    def on_processor(self) -> StreamedModel:
        """`stream` where files are written from, and held against other libraries."""
        from quantkit.model.streaming.stream import CPU as PROCESSOR

        return self.stream if self.device.is_cpu else self.stream.on(PROCESSOR)

    def placed(self, stream: StreamedModel) -> StreamedModel:
        """A model where this compile computes."""
        return stream.on(self.device.torch, self.device.place)


def _files(steps: Sequence[PassRun]) -> list[str]:
    """Files that passes read: importance matrices."""
    given = (step.settings.model_dump().get("imatrix") for step in steps)
    return [file for file in given if file]


def fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Everything that a bundle's content depends on."""
    import torch

    versions = machine.versions()
    relevant = ("python", "torch", "transformers", "compressed-tensors", "safetensors", "numpy", *_GRAPH)
    return {
        "quantkit": __version__,
        "model": prepared.source.ref,
        "source": prepared.source.sha256,
        "recipe": prepared.request.recipe.as_dict(),
        "code": prepared.request.recipe.outside(),
        "files": [file_sha256(Path(file)) for file in _files(prepared.steps)],
        "calibration": prepared.calibration.sha256 if prepared.calibration else None,
        "scoring": prepared.scoring.sha256,
        "threads": torch.get_num_threads(),
        "isa": machine.isa(),
        "versions": {name: versions[name] for name in relevant if name in versions},
        **prepared.device.as_dict(),
    }
