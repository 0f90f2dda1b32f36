"""Heads that draft tokens beside a model: carried in floats, declared, and no hindrance to the rest."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from conftest import recipe  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from zoo import shrink

import quantkit

_SIZES = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_NEXT = {
    **{**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    **{"max_position_embeddings": 64},
}
# experts have no zero points
EVEN = {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": True}}


def deepseek(folder: Path) -> str:
    """A head numbered on behind the last block, with its own embedding, norms and experts."""
    zoo.mixture("deepseek", vocab_size=258, num_nextn_predict_layers=1).save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    own = {
        name.replace("layers.1.", "layers.2."): value + 0.5 for name, value in tensors.items() if "layers.1." in name
    }
    own |= {f"model.layers.2.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128),
        "model.layers.2.embed_tokens.weight": torch.ones(258, 64),
    }
    own["model.layers.2.shared_head.head.weight"] = torch.ones(258, 64)
    save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})
    return "model.layers.2."


def qwen(folder: Path) -> str:
    """A head under a name of its own."""
    model = zoo.filled(transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig(**_NEXT))
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    own = {
        name.replace("model.layers.1.", "mtp.layers.0."): value.clone()
        for name, value in tensors.items()
        if "layers.1." in name
    }
    own |= {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.ones(64)}
    save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})
    return "mtp."


def glm(folder: Path) -> str:
    """A head as DeepSeek's; transformers is told to leave the last block's number out."""
    shrink.tiny("Glm4MoeForCausalLM", folder, vocab_size=258, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    before, after = f"layers.{shrink.LAYERS - 1}.", f"layers.{shrink.LAYERS}."
    own = {name.replace(before, after): value + 0.5 for name, value in tensors.items() if before in name}
    own |= {f"model.{after}eh_proj.weight": torch.randn(64, 128), f"model.{after}enorm.weight": torch.ones(64)}
    save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})
    return f"model.{after}"


@pytest.mark.parametrize("made", [deepseek, qwen, glm])
def test_a_draft_head_is_carried_and_declared(
    made: Any, tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    prefix = made(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    bundle = quantkit.compile(
        tmp_path / "model", recipe("checkpoint", scheme=EVEN), out=tmp_path / "q", speed=False, vllm=False
    )
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model", bundle.model_folder))
    own = [name for name in before if name.startswith(prefix)]
    assert len(own) > 10 and all(torch.equal(before[name], after[name]) for name in own)
    (entry,) = (entry for entry in bundle.manifest.weights if entry.state == "unused")
    assert entry.tensors == len(own) and "drafts tokens" in entry.reason
    config = json.loads((bundle.model_folder / "config.json").read_text())
    matrices = [name.removesuffix(".weight") for name in own if before[name].dim() == 2]
    assert set(matrices) <= set(config["quantization_config"]["ignore"])
    assert config.get("num_nextn_predict_layers") == (None if made is qwen else 1)
