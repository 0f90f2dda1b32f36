"""Tiny models of `zoo` as ONNX, for the tests of the exporter and the runtime."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from exported import check_as, write_as
from torch import Tensor, nn

from quantkit.bundle import Bundle, Check, Decision, Manifest, ModelEntry, SourceEntry, content_sha256, inventory, seal
from quantkit.exporters import load_exporter
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.activation import InputScale
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import is_linear, is_transposed
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

Schemes = WeightScheme | Callable[[str], WeightScheme | None] | None
# sizes of a llama for the tests' byte tokenizer; one set, so one trace
TEXT = {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 128, "eos_token_id": 257}
# sizes of networks for TensorRT: two, if blocks alternate
LAYERS = {"num_hidden_layers": 2}
EXPORT = load_exporter("onnx")


def scheme(form: str = "int4", **fields: Any) -> WeightScheme:
    """Return int4 in groups of 32 with a zero point, with changes."""
    return WeightScheme(format=form, **(fields or {"granularity": "group", "group": 32, "symmetric": False}))


@dataclass
class Small:
    """An exported model; the folder holds `onnx/`."""

    folder: Path
    model: nn.Module
    source: Source
    stream: StreamedModel
    results: Finished
    options: Mapping[str, Any]
    decisions: list[Decision]
    exporter: Any = EXPORT

    @property
    def onnx(self) -> Path:
        return self.folder / "onnx"

    def check(self) -> dict[str, Check]:
        found = check_as(self.exporter, self.folder, self.source, self.stream, self.results, self.options)
        return {check.name: check for check in found}

    def load(self, **settings: Any) -> Any:
        from quantkit.runtimes.onnxruntime.session import OnnxModel

        return OnnxModel(self.onnx, **{"threads": 1, "accuracy_level": 0, **settings})

    def proto(self) -> Any:
        """Load the graph without its weights."""
        import onnx

        return onnx.load(str(self.onnx / "model.onnx"), load_external_data=False)

    def tensors(self) -> dict[str, Any]:
        """Map initializers to values."""
        import onnx

        model = onnx.load(str(self.onnx / "model.onnx"))
        return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def quantized(weight: Tensor, how: WeightScheme) -> QuantTensor:
    """Round to nearest, [N, K]; filled up with zeros to whole groups, as `on_indivisible: pad` does."""
    missing = -weight.shape[1] % (how.group or 1)
    found: QuantTensor = load_format(how.format).quantize(nn.functional.pad(weight.float(), (0, missing)), how)
    return found


def export(
    folder: Path,
    name: str,
    schemes: Schemes = None,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    changes: Mapping[str, Any] | None = None,
    activations: ActivationScheme | None = None,
    kv_cache: CacheScheme | None = None,
    exporter: Any = EXPORT,
    **options: Any,
) -> Small:
    """Save a model of the zoo, round its blocks' linears (and the head, if `schemes` has it), and export it.

    Args:
        exporter: `onnx` by default.
        activations: scheme of the blocks' linears' inputs; a fixed scale is 0.05, with zero point -3 if it has one.
        kv_cache: scheme of all blocks; the scale of keys is 0.05, that of values 0.03.

    Returns:
        export, with the dequantized values in `model`.
    """
    model = zoo.tiny(name, **(changes or {})).to(dtype)
    model.save_pretrained(folder / "source")  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "source")
    source = open_model(str(folder / "source"))
    stream = StreamedModel(source)
    blocks = tuple(f"{block}." for block in stream.block_names)
    # the reference computes in float32; `model.float()` would keep the rounding of buffers that no file holds
    model, stored = zoo.tiny(name, **(changes or {})), model.state_dict()
    model.load_state_dict(stored)
    tensors, chosen = {}, {}
    for linear, module in stream.skeleton.named_modules():
        if not is_linear(module) or not (linear.startswith(blocks) or callable(schemes)):
            continue
        if (how := schemes(linear) if callable(schemes) else schemes) is None:
            continue
        weight = source.weights.read(stream.files[f"{linear}.weight"])
        turned = is_transposed(module)
        tensors[linear], chosen[linear] = quantized(weight.T if turned else weight, how), how
        values = load_format(how.format).dequantize(tensors[linear])
        target: Any = model.get_submodule(linear).weight
        with torch.no_grad():
            target.copy_(values[:, : target.shape[0]].T if turned else values[:, : target.shape[1]])
    inside = [linear for linear in tensors if linear.startswith(blocks)] if activations else []
    fixed = {linear: _fixed(dtype, activations) for linear in inside if activations and not activations.dynamic}
    finished.save(folder / "block.safetensors", tensors, {}, fixed)
    files = [folder / "block.safetensors"]
    for index, block in enumerate(stream.block_names if kv_cache is not None else ()):
        files.append(folder / f"cache-{index}.safetensors")
        keys, own = (InputScale(torch.tensor([number], dtype=dtype)) for number in (0.05, 0.03))
        finished.save(files[-1], {}, {}, cache=(block, keys, own))
    results = Finished(files, chosen, dict.fromkeys(inside, activations), kv_cache)  # type: ignore[arg-type]
    out = folder / "bundle"
    out.mkdir()
    decisions = write_as(exporter, out, source, stream, results, options)
    return Small(out, model, source, stream, results, options, decisions, exporter)


def _fixed(dtype: torch.dtype, how: ActivationScheme) -> InputScale:
    zero = None if how.symmetric else torch.tensor([-3], dtype=torch.int8)
    return InputScale(torch.tensor([0.05], dtype=dtype), zero)


@torch.no_grad()
def expected(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Any:
    """Run transformers' own forward: logits, or an encoder's last hidden states."""
    return model(ids, attention_mask=mask)[0].numpy()


def relative(found: Any, wanted: Any) -> float:
    """Return max |found - wanted| / max |wanted|."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def bundle(folder: Path, kind: Any = "decoder", layers: Any = ()) -> Bundle:
    """Give the folder a manifest of its files."""
    files = inventory(folder)
    manifest = Manifest(
        quantkit="0",
        content_sha256=content_sha256(files),
        state="complete",
        model=ModelEntry(name="m", kind=kind, source=SourceEntry(ref="path:m", sha256="0", dtype="float32")),
        recipe={},
        target={},
        calibration=None,
        layers=list(layers),
        decisions=[],
        checks=[],
        verdict=None,
        seed=0,
        threads=1,
        isa="none",
        device={},
        versions={},
        created="2025-01-01T00:00:00Z",
        files=files,
    )
    seal.write_manifest(folder, manifest.as_bytes())
    return Bundle.load(folder)


def kept(small: Small, folder: Path) -> Small:
    """Copy an export, for a test to damage."""
    import shutil

    shutil.copytree(small.folder, folder)
    found = copy.copy(small)
    found.folder = folder
    return found
