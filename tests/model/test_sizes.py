"""How many tokens a sequence can have, by what plain transformers takes."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from quantkit.model.structure.kinds import positions

SIZES = {
    **{"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "channel_shrink_ratio": 2},
    **{"word_embed_proj_dim": 24, "ffn_dim": 32},
    **{"entity_vocab_size": 5, "entity_emb_size": 8, "position_embedding_type": "absolute"},
    **{"attention_window": 8, "languages": ["en_XX"], "default_language": "en_XX", "mask_token_id": 3},
}
BEHIND = "roberta xlm-roberta xlm-roberta-xl camembert data2vec-text ibert roberta-prelayernorm mpnet longformer"
BEHIND += " xmod luke esm markuplm lilt"
WHOLE = "bert electra albert distilbert gpt2 opt biogpt xlm deberta"


@pytest.mark.parametrize(("name", "most"), [("XLNetLMHeadModel", None), ("XGLMForCausalLM", 40)])
def test_positions_that_are_computed_have_no_table(name: str, most: int | None) -> None:
    """XLNet says -1, for any number; XGLM's table of sines has no weight."""
    model_class = getattr(transformers, name)
    small = {"d_model": 24, "num_layers": 2, "ffn_dim": 32, "attention_heads": 2, "n_layer": 2, "n_head": 2}
    sizes = {"vocab_size": 50, **small, **({"max_position_embeddings": most} if most else {})}
    config = model_class.config_class(**sizes)
    config.architectures = [name]
    assert positions(config.to_dict()) == most


@pytest.mark.parametrize("kind", [*BEHIND.split(), *WHOLE.split()])
@pytest.mark.parametrize("padding", [1, 4])
def test_a_sequence_has_as_many_tokens_as_transformers_takes(kind: str, padding: int) -> None:
    config = AutoConfig.for_model(kind, **SIZES, max_position_embeddings=40)
    config.pad_token_id = padding
    model = AutoModel.from_config(config).eval()
    config.architectures = [type(model).__name__]
    most = positions(config.to_dict())
    assert most is not None
    assert (most < 40) == (kind in BEHIND.split())
    with torch.no_grad():
        model(input_ids=torch.full((1, most), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, most + 1), 7))
