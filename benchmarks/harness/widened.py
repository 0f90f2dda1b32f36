"""A decoder with more channels and heads, of zeros, so that 256 divides its width; its logits are compared first.

request: {"model": MODEL, "width": 768, "out": FOLDER}
answer: {"difference": of the logits, over the largest, "kl": in nats a token}

Llama and Qwen 2: norms see a mean square over more channels, so that their gains and epsilon shrink by the ratio.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.model.source.open import open_model

# of float32 sums in another order, over the largest logit
LIMIT = 1e-4


def filled(values: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix with zeros below and beside it."""
    wide = values.new_zeros(rows, columns)
    wide[: values.shape[0], : values.shape[1]] = values
    return wide


def main(request: dict[str, Any]) -> dict[str, float]:
    width, source = request["width"], open_model(request["model"])
    before = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    config, wide = before.config, AutoConfig.from_pretrained(source.path)
    old, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or old // heads
    more = width // size
    wide.hidden_size, wide.num_attention_heads, wide.head_dim = width, more, size
    wide.rms_norm_eps = config.rms_norm_eps * old / width

    def queries(rows: Tensor) -> Tensor:
        """Rows of heads; every group of keys gets more of them."""
        of = rows.view(groups, heads // groups * size, -1)
        padded = of.new_zeros(groups, more // groups * size, of.shape[2])
        padded[:, : of.shape[1]] = of
        return padded.flatten(0, 1)

    made: dict[str, Tensor] = {}
    for name, value in before.state_dict().items():
        if name.endswith("norm.weight"):
            made[name] = filled(value[None], 1, width)[0] * math.sqrt(old / width)
        elif name.endswith("q_proj.bias"):
            made[name] = queries(value[:, None])[:, 0]
        elif name.endswith("q_proj.weight"):
            made[name] = filled(queries(value), more * size, width)
        elif name.endswith("o_proj.weight"):
            made[name] = filled(queries(value.T.contiguous()).T, width, more * size)
        elif name.endswith("down_proj.weight"):
            made[name] = filled(value, width, value.shape[1])
        else:
            made[name] = filled(value, value.shape[0], width) if value.dim() == 2 else value
    after = AutoModelForCausalLM.from_config(wide, dtype=torch.float32).eval()
    after.load_state_dict(made)
    ids = torch.randint(0, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model(ids).logits for model in (after, before))
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if difference > LIMIT:
        raise SystemExit(f"logits of the widened model differ by {difference:.1e} of the largest")
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    after.save_pretrained(request["out"])
    source.tokenizer().save_pretrained(request["out"])
    return {"difference": difference, "kl": float((p.exp() * (p - q)).sum(-1).mean())}
