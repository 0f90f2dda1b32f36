"""A random BERT as a float ONNX graph, with token ids to calibrate and score it on: for crashes, never for quality."""

from __future__ import annotations

from pathlib import Path

SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
TOKENS, VOCABULARY = 64, 512


def make(file: Path, samples: Path, *, count: int = 100, seed: int = 0) -> None:
    """Write the graph, from token ids to one vector a text, and the samples of it."""
    import numpy as np
    import torch
    import transformers
    from torch import nn

    from quantkit.model.to_onnx import write_onnx

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **SIZES)
            config._attn_implementation = "eager"
            self.inside = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            vectors: torch.Tensor = self.inside(input_ids=ids).last_hidden_state
            return vectors.mean(dim=1)

    torch.manual_seed(seed)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (count, TOKENS))
    write_onnx(Encoder().eval(), {"ids": torch.from_numpy(ids[:2])}, file, outputs=["vector"])
    np.savez(samples, ids=ids)


def main(request: dict[str, str]) -> None:
    make(Path(request["file"]), Path(request["samples"]))
