"""What llama.cpp computes of a file is what transformers computes of the model; all else is refused before work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec
from quantkit.exporters.gguf.architecture import type_of
from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.exporters.values import Values
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")
needed = pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
# of logits, relative to the largest: what llama.cpp's tables of exponentials leave of float32
LIMIT = 6e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWED: dict[str, Any] = {"query_pre_attn_scalar": 16, "sliding_window": 16, "num_hidden_layers": 2}
GEMMA2 = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 = WINDOWED | {"layer_types": ["sliding_attention"] * 2}


def larger(layers: int, every: int) -> dict[str, Any]:
    """A Gemma whose layers are as many as those of the 27B, heads of 16 and hidden / heads = 24."""
    kinds = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]
    sizes = {"hidden_size": 96, "head_dim": 16, "query_pre_attn_scalar": 24}
    return WINDOWED | sizes | {"num_hidden_layers": layers, "layer_types": kinds}


def rope(**how: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **how}}


def layers(full: str = "default", sliding: str = "default") -> dict[str, Any]:
    """Rotary embedding of layers that see everything, and of those that see a window."""
    more = {"factor": 4.0, "original_max_position_embeddings": 16}
    kinds = {"full_attention": (full, 1e6), "sliding_attention": (sliding, 1e4)}
    return {
        name: {"rope_type": how, "rope_theta": base} | (more if how != "default" else {})
        for name, (how, base) in kinds.items()
    }


@pytest.fixture
def made(tmp_path: Path, merging_tokenizer: Any) -> Any:
    def model(kind: str, changes: dict[str, Any]) -> Path:
        return zoo.save(tmp_path / "m", merging_tokenizer, kind, vocab_size=len(merging_tokenizer), **changes)

    return model


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qwen2", {"head_dim": 32}, "head_dim 32; llama.cpp's qwen2 has heads of .* here 16"),
        ("qwen3", {"attention_bias": True}, "q_proj.bias; llama.cpp's qwen3 has no such tensor"),
        ("gemma2", {**GEMMA2, "attention_bias": True}, "q_proj.bias; llama.cpp's gemma2 has no such tensor"),
        ("gemma3", {**GEMMA3, "attention_bias": True}, "q_proj.bias; llama.cpp's gemma3 has no such tensor"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_type llama3; for qwen2: default, linear, yarn"),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "yarn with truncate false"),
        ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}, "yarn with mscale 0.7"),
        ("qwen3", rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5; llama.cpp's qwen3 rotates whole heads"),
        *(
            ("gemma3", {**GEMMA3, "rope_parameters": layers(sliding=how)}, f"rope_type {how} of layers with a window")
            for how in ("linear", "yarn", "dynamic")
        ),
        ("gemma3", {**GEMMA3, "rope_parameters": layers(full="yarn")}, "rope_type yarn; for gemma3: default, linear"),
        ("llama", {"mlp_bias": True}, "mlp_bias; transformers' reader of GGUF"),
        ("gemma2", {**GEMMA2, "tie_word_embeddings": False}, "a head of its own"),
        ("gemma2", {**larger(4, 2)}, "attention of gemma2 with 4 layers by 16"),
    ],
)
def test_refused_before_work(made: Any, kind: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"layout-unsupported.*{said}"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec(source=open_model(str(made(kind, changes)))))


@needed
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 32, "rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
        ("qwen2", rope(rope_type="linear", factor=4.0)),
        ("qwen3", {"head_dim": 32}),
        ("gemma2", {**GEMMA2, **rope(rope_theta=500.0)}),
        ("gemma2", {**GEMMA2, **rope(rope_type="linear", factor=4.0)}),
        ("gemma3", {**GEMMA3, "tie_word_embeddings": False, "rope_parameters": layers(full="linear")}),
        ("gemma2", larger(46, 2)),
        ("gemma3", larger(62, 6)),
    ],
)
def test_llama_cpp_computes_it(made: Any, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    assert difference(made(kind, changes), tmp_path) < LIMIT


def difference(folder: Path, place: Path) -> float:
    """Between llama.cpp's logits of a file in float32 and transformers' own forward, relative to the largest."""
    from transformers import AutoModelForCausalLM

    from quantkit.runtimes import load_runtime

    source = open_model(str(folder))
    EXPORT.accepts(EXPORT.Options(), LayerSpec(source=source))
    values = Values.of_results(source, StreamedModel(source), Finished([], {}))
    EXPORT.export(place / "b" / "gguf", values, EXPORT.Options(floats="float32"))
    ids = np.random.default_rng(0).integers(0, 256, (1, 40))
    model = load_runtime("llama_cpp").open(place / "b", 1)
    found = model.run(model.state(1, 40), ids)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.from_numpy(ids)).logits.numpy()
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(("scale", "remedy"), [("float16", "scheme.weights.group=32"), ("bfloat16", "gguf-q4_0")])
def test_a_scheme_without_a_type_is_refused_with_what_can_be_set(scale: str, remedy: str) -> None:
    """Scales of a bfloat16 model's checkpoint are bfloat16, whatever is set: only a recipe for GGUF helps."""
    scheme = WeightScheme.model_validate({"format": "int4", "granularity": "group", "group": 64, "scale": scale})
    with pytest.raises(InputError, match="layout-unsupported") as caught:
        type_of(scheme)
    assert remedy in str(caught.value.remedy)
