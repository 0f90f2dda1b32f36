"""A checkpoint read block by block gives the numbers that plain transformers gets out of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from exported import write_as
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from quantkit.exporters import load_exporter
from quantkit.formats import load_format
from quantkit.model import finished
from quantkit.model.finished import DenseWeights, Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import is_linear, is_transposed
from quantkit.runtimes.torch.reloaded import reloaded
from quantkit.scheme import WeightScheme


def export(model: nn.Module, folder: Path, scheme: Any, **options: Any) -> Path:
    """The checkpoint of a model whose linears are rounded by `scheme`, or by a function of their names."""
    model.save_pretrained(folder / "source")  # type: ignore[operator]
    source = open_model(str(folder / "source"))
    stream = StreamedModel(source)
    tensors, schemes = {}, {}
    for name, module in stream.skeleton.named_modules():
        chosen = scheme(name) if callable(scheme) else scheme
        if not name.startswith(tuple(stream.block_names)) or not is_linear(module) or chosen is None:
            continue
        weight = source.weights.read(stream.files[f"{name}.weight"]).float()
        weight = weight.T if is_transposed(module) else weight
        tensors[name] = load_format(chosen.format).quantize(weight, chosen)
        schemes[name] = chosen
    finished.save(folder / "block", tensors, {})
    (folder / "bundle").mkdir()
    results = Finished([folder / "block"], schemes)
    write_as(load_exporter("checkpoint"), folder / "bundle", source, stream, results, options)
    return folder / "bundle" / "model"


def plain(folder: Path, ids: torch.Tensor, kind: Any = AutoModelForCausalLM) -> torch.Tensor:
    """What transformers makes of it: weights as it expands them, computed in float32 as the stream does."""
    model = kind.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        model(input_ids=ids[:1, :2])  # packed weights are expanded by the first forward
        found: torch.Tensor = nn.Module.float(model)(input_ids=ids)[0]
    return found


def streamed(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    stream = reloaded(folder)
    hidden = stream.run(ids, chunk=2)
    return Head(stream.rest(), stream.paths, stream.flow)(hidden, ids)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


GROUP = {"granularity": "group", "group": 32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"format": "int4", **GROUP},
        {"format": "int4", **GROUP, "symmetric": False},
        {"format": "int4"},
        {"format": "int4", "symmetric": False},
        {"format": "int8"},
        {"format": "int8", **GROUP, "symmetric": False},
        {"format": "int8", "granularity": "tensor"},
    ],
)
def test_streamed_equals_from_pretrained(tmp_path: Path, dtype: str, fields: dict[str, Any]) -> None:
    scale = "float16" if dtype == "float32" else dtype
    model = zoo.tiny("llama", num_hidden_layers=1).to(getattr(torch, dtype))
    folder = export(model, tmp_path, WeightScheme(**fields, scale=scale))
    ids = zoo.ids(3, 10)
    assert close(streamed(folder, ids), plain(folder, ids))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3", "opt"])
def test_other_architectures(tmp_path: Path, name: str) -> None:
    folder = export(
        zoo.tiny(name, num_hidden_layers=2), tmp_path, WeightScheme(format="int4", **GROUP, symmetric=False)
    )
    ids = zoo.ids(3, 10)
    assert close(streamed(folder, ids), plain(folder, ids))


def test_a_streamed_encoder_equals_transformers(tmp_path: Path) -> None:
    folder = export(zoo.tiny("bert", num_hidden_layers=1), tmp_path, WeightScheme(format="int8"))
    ids = zoo.ids(3, 10)
    assert close(streamed(folder, ids), plain(folder, ids, AutoModel))


def test_a_dense_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    model = zoo.tiny("gpt2", n_layer=2)
    folder = export(model, tmp_path, WeightScheme(format="int4", **GROUP), layout="dense")
    ids = zoo.ids(3, 10)
    assert not isinstance(reloaded(folder).source.weights, DenseWeights)
    assert close(streamed(folder, ids), plain(folder, ids))


def test_several_schemes_and_layers_left_alone(tmp_path: Path) -> None:
    def mixed(name: str) -> WeightScheme | None:
        if name.endswith("o_proj"):
            return None
        return WeightScheme(format="int8") if "mlp" in name else WeightScheme(format="int4", **GROUP)

    folder = export(zoo.tiny("llama"), tmp_path, mixed)
    ids = zoo.ids(3, 10)
    assert close(streamed(folder, ids), plain(folder, ids))
    weights = reloaded(folder).source.weights
    assert isinstance(weights, DenseWeights)
    # packed tensors and their companions are seen as the dense ones they stand for, and nothing else is
    assert not [name for name in weights.entries if "weight_" in name]
    assert weights.entries["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)
    dense = zoo.tiny("llama").state_dict()
    assert set(weights.entries) <= dense.keys()
    assert torch.equal(weights.read("model.norm.weight"), dense["model.norm.weight"])
    assert torch.equal(
        weights.read("model.layers.1.self_attn.o_proj.weight"), dense["model.layers.1.self_attn.o_proj.weight"]
    )
