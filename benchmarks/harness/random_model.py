"""A random Llama or mixture on disk, of any depth, made one layer at a time: for memory and crashes, never for quality.

Its tokenizer has one token a byte, so the shipped calibration text serves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# 7 linears: 4 x 768 x 768 + 3 x 768 x 2304 weights = 30.7 MB in float32
LARGE = {"hidden": 768, "intermediate": 2304, "heads": 12}
SMALL = {"hidden": 64, "intermediate": 192, "heads": 4}


def layer_bytes(hidden: int, intermediate: int, heads: int) -> int:
    """Bytes of one layer's linears, float32."""
    return 4 * (4 * hidden * hidden + 3 * hidden * intermediate)


def make(folder: Path, *, device: str = "cpu", seed: int = 0, **described: Any) -> None:
    """Write config, tokenizer and one shard a layer.

    Args:
        folder: new.
        device: that weights are drawn on; each draws others.
        seed: of the weights.
        described: as of `describe`.
    """
    describe(folder, **described)
    fill(folder, device=device, seed=seed)


def describe(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int | None = None,
    vocabulary: int | None = None,
    tied: bool = False,
    positions: int = 512,
    dtype: str = "float32",
    experts: int = 0,
    active: int = 0,
    head_dim: int | None = None,
) -> None:
    """Config and tokenizer alone.

    Args:
        folder: new.
        layers: how many.
        hidden, intermediate, heads: widths.
        kv_heads: of keys and values; as many as of queries by default.
        vocabulary: rows of embedding and head; those that the tokenizer knows by default.
        tied: whether they are one tensor.
        positions: tokens that a sequence can have.
        dtype: of the weights.
        experts: of a layer, each of width `intermediate`: a Qwen3 mixture; 0 is a Llama.
        active: of them, for a token.
        head_dim: by default, hidden over heads.
    """
    import transformers

    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    kind = "Qwen3Moe" if experts else "Llama"
    mixture = {"num_experts": experts, "num_experts_per_tok": active, "moe_intermediate_size": intermediate}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=257,
        dtype=dtype,
        architectures=[f"{kind}ForCausalLM"],
        head_dim=head_dim or hidden // heads,
        **(mixture if experts else {}),
    )
    config.save_pretrained(folder)


def fill(folder: Path, *, device: str = "cpu", seed: int = 0) -> None:
    """Weights for the config that stands in the folder, in its dtype."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {apart: size for name, tensor in model.state_dict().items() for apart, size in _apart(name, tensor.shape)}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    shards: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(part, []).append(name)
    generator = torch.Generator(device).manual_seed(seed)
    placed: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards.values()):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            shape = shapes[name]
            spread = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
            value = torch.randn(shape, generator=generator, device=device) * spread
            value = value + 1.0 if len(shape) == 1 else value
            tensors[name] = value.to(config.dtype).cpu()
            placed[name] = file
            total += tensors[name].nbytes
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _apart(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """A tensor as files have it: transformers joins experts, and gate with up, as it loads them."""
    place, _, leaf = name.rpartition(".experts.")
    for expert in range(shape[0]) if place else ():
        if leaf == "gate_up_proj":
            for part in ("gate_proj", "up_proj"):
                yield f"{place}.experts.{expert}.{part}.weight", (shape[1] // 2, shape[2])
        else:
            yield f"{place}.experts.{expert}.{leaf}.weight", shape[1:]
    if not place:
        yield name, shape


def byte_tokenizer() -> Any:
    """Ids 0..255 are bytes, then `<s>` and `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def main(request: dict[str, Any]) -> None:
    make(Path(request.pop("folder")), **request)
