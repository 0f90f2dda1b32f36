"""Export a tiny model as a checkpoint, with every linear rounded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.bundle import Check
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.exporters.values import Values
from quantkit.formats import QuantTensor, load_format
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.scheme import WeightScheme

ASYMMETRIC = {"granularity": "group", "group": 32, "symmetric": False}


def write_as(
    exporter: Any, bundle: Path, source: Source, stream: StreamedModel, results: Finished, options: Any
) -> Any:
    """Export into a bundle's folder."""
    values = Values.of_results(source, stream, results)
    return exporter.export(bundle / exporter.place, values, exporter.Options(**options))


def check_as(
    exporter: Any, bundle: Path, source: Source, stream: StreamedModel, results: Finished, options: Any, **how: Any
) -> list[Check]:
    """Check the export against the expected values."""
    values = Values.of_results(source, stream, results)
    found: list[Check] = exporter.check(
        bundle, values, options if options is None else exporter.Options(**options), **how
    )
    return found


def scheme(form: str = "int4", **fields: Any) -> WeightScheme:
    return WeightScheme(format=form, **{**({} if fields else ASYMMETRIC), **fields})


def quantize(weight: Tensor, how: WeightScheme) -> QuantTensor:
    found: QuantTensor = load_format(how.format).quantize(weight.float(), how)
    return found


def llama(
    folder: Path, dtype: torch.dtype = torch.float32, *, tied: bool = True, shards: int = 1, **changes: Any
) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 20_000 if shards > 1 else "1GB")
    return folder


@dataclass
class Exported:
    folder: Path
    source: Source
    stream: StreamedModel
    results: Finished
    options: dict[str, Any]
    decisions: list[Any] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def check(self, **settings: Any) -> list[Check]:
        return check_as(EXPORT, self.folder, self.source, self.stream, self.results, self.options, **settings)

    def weight(self, linear: str) -> Tensor:
        return self.source.weights.read(self.stream.files[f"{linear}.weight"])


def export(
    path: Path, folder: Path, schemes: Any, *, head: bool = False, norms: float = 1.5, **options: Any
) -> Exported:
    """Round every linear of the blocks, by one scheme or by a function of its name, and change norms by a factor."""
    source = open_model(str(path))
    stream = StreamedModel(source)
    blocks = tuple(f"{name}." for name in stream.block_names) + (("lm_head",) if head else ())
    from quantkit.model.structure.traced import is_linear, is_transposed

    tensors, chosen = {}, {}
    for name, module in stream.skeleton.named_modules():
        how = schemes(name) if callable(schemes) else schemes
        if name.startswith(blocks) and is_linear(module) and how is not None:
            weight = source.weights.read(stream.files[f"{name}.weight"])
            tensors[name] = quantize(weight.T if is_transposed(module) else weight, how)
            chosen[name] = how
    changed = {}
    for name in stream.files:
        if name.endswith("post_attention_layernorm.weight"):
            changed[name] = source.weights.read(stream.files[name]) * norms
    file = folder.parent / f"{folder.name}-block.safetensors"
    folder.mkdir()
    finished.save(file, tensors, changed)
    exported = Exported(folder, source, stream, Finished([file], chosen), options)
    exported.decisions = write_as(EXPORT, folder, source, stream, exported.results, options)
    return exported


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


SCHEMES = {
    "group-asymmetric": scheme(),
    "group-symmetric": scheme(granularity="group", group=32, symmetric=True),
    "channel-asymmetric": scheme(granularity="channel", symmetric=False),
    "channel-symmetric": scheme(granularity="channel"),
    "tensor-asymmetric": scheme(granularity="tensor", symmetric=False),
    "tensor-symmetric": scheme(granularity="tensor"),
    "int8-channel": scheme("int8", granularity="channel"),
    "int8-group-asymmetric": scheme("int8", **ASYMMETRIC),
    "float32-scales": scheme(scale="float32", **ASYMMETRIC),
}
