"""Experts in a GGUF file: one tensor for all of a layer, read back by the package, transformers and llama.cpp."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import zoo
from exported import by_name, check_as, export, write_as
from exporters.test_gguf_classes import LIMIT, difference, needed

from quantkit.errors import InputError
from quantkit.exporters import LayerSpec
from quantkit.exporters.gguf.exporter import EXPORT, MODEL
from quantkit.model.source.open import open_model
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def made(tmp_path: Path, merging_tokenizer: Any) -> Any:
    def model(**changes: Any) -> Path:
        own = {"vocab_size": len(merging_tokenizer), "norm_topk_prob": True, "mlp_only_layers": [], **changes}
        zoo.mixture("qwen3", **own).save_pretrained(tmp_path / "m")  # type: ignore[operator]
        merging_tokenizer.save_pretrained(tmp_path / "m")
        return tmp_path / "m"

    return model


@pytest.mark.parametrize("how", [WeightScheme(format="q8_0"), None])
def test_a_layers_experts_are_one_tensor(made: Any, tmp_path: Path, how: Any) -> None:
    options = {"floats": "float32"}
    bundle = export(made(), tmp_path / "b", how, layout="dense")
    write_as(EXPORT, tmp_path / "b", bundle.source, bundle.stream, bundle.results, options)
    checks = by_name(check_as(EXPORT, tmp_path / "b", bundle.source, bundle.stream, bundle.results, options))
    assert all(check.ok for check in checks.values()), checks
    assert "reload.gguf" in checks
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "b" / "gguf" / MODEL).tensors}
    gate = stored["blk.1.ffn_gate_exps.weight"]
    assert (gate.tensor_type.name, list(gate.shape)) == ("Q8_0" if how else "F32", [64, 32, 4])
    assert stored["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"
    third = torch.from_numpy(np.array(gguf.quants.dequantize(gate.data, gate.tensor_type))).reshape(4, 32, 64)[2]
    linear = "model.layers.1.mlp.experts.2.gate_proj"
    wanted = bundle.results.quantized(linear).dense() if how else bundle.stream.tensor(f"{linear}.weight")
    assert torch.equal(third, wanted)


@needed
def test_llama_cpp_computes_it(made: Any, tmp_path: Path) -> None:
    assert difference(made(), tmp_path) < LIMIT


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"norm_topk_prob": False}, "norm_topk_prob false"), ({"mlp_only_layers": [0]}, "layers without experts")],
)
def test_what_llama_cpp_computes_otherwise_is_refused(made: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"layout-unsupported.*{said}"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec(source=open_model(str(made(**changes)))))


def test_experts_of_several_types_are_refused(made: Any) -> None:
    source = open_model(str(made()))
    place = "model.layers.0.mlp.experts"
    schemes = {f"{place}.0.gate_proj": WeightScheme(format="q8_0")}
    shapes = dict.fromkeys([*schemes, f"{place}.1.gate_proj"], (32, 64))
    with pytest.raises(InputError, match=r"layout-unsupported.*experts of several types"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec(schemes, shapes=shapes, source=source))
