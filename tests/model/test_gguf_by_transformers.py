"""A GGUF of an architecture that transformers reads and no rule of ours speaks of: its logits come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from exported import export

from quantkit.errors import InputError
from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.model.source.open import open_model
from quantkit.scheme import WeightScheme


def written(place: Path, name: str, tokenizer: Any, how: WeightScheme | None = None, **changes: Any) -> Path:
    model = zoo.tiny(name, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(place / name)
    tokenizer.save_pretrained(place / name)
    made = export(place / name, place / f"{name}-out", how, layout="dense")
    for changed in list(made.results.changed):  # the file is to be the model as it is
        made.results._places.pop(changed)
    made.results.changed.clear()
    EXPORT.write(made.folder, made.source, made.stream, made.results, {"floats": "float32"})
    path = place / f"{name}.gguf"
    (made.folder / "gguf" / "model.gguf").rename(path)
    return path


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        (
            "gemma2",
            {
                "query_pre_attn_scalar": 256,  # which transformers takes every file for
                "head_dim": 256,
                "sliding_window": 16,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
)
def test_logits_come_back(tmp_path: Path, merging_tokenizer: Any, name: str, changes: dict[str, Any]) -> None:
    path = written(tmp_path, name, merging_tokenizer, **changes)
    source = open_model(str(path))
    assert source.was == "gguf ALL_F32" and "losses are against that" in source.notes[0]
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        found, wanted = (each.load()(ids).logits for each in (source, open_model(str(tmp_path / name))))
    torch.testing.assert_close(found, wanted)


def test_a_quantized_file_says_on_which_grid_it_lies(tmp_path: Path, merging_tokenizer: Any) -> None:
    path = written(tmp_path, "qwen3", merging_tokenizer, WeightScheme(format="q4_0"))
    source = open_model(str(path))
    assert source.was == "gguf Q4_0" and "requantizing a quantized model adds harm" in source.notes[0]


def test_what_transformers_passes_over_is_refused(tmp_path: Path, merging_tokenizer: Any) -> None:
    path = written(tmp_path, "qwen3", merging_tokenizer)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"qwen3.rope.freq_base", b"qwen3.rope.free_case"))
    with pytest.raises(InputError, match=r"gguf-architecture.*qwen3.rope.free_case"):
        open_model(str(path))
    path.write_bytes(raw.replace(b"qwen3", b"qwenX"))
    with pytest.raises(InputError, match=r"gguf-architecture.*qwenX"):
        open_model(str(path))
    path.write_bytes(raw.replace(b"blk.0.attn_q_norm.weight", b"blk.0.attn_k_xxxx.weight"))
    with pytest.raises(InputError, match=r"gguf-architecture.*tensor blk.0.attn_k_xxxx"):
        open_model(str(path))
