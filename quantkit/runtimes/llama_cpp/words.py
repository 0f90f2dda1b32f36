"""A GGUF file's tokenizer where llama.cpp is not installed: out of its metadata, for a device that has llama.cpp.

Which tokens end a text llama.cpp knows by their names too (llama-vocab.cpp, `special_eog_ids`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from quantkit.errors import MissingDependency
from quantkit.model.source.gguf.file import fields
from quantkit.model.source.gguf.tokenizer import demand_whole, tokenizer_config, tokenizer_json
from quantkit.runtimes.llama_cpp.library import SAMPLING
from quantkit.runtimes.text import Tokenizer

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>"),
    # parts of a repository that begin where code was to be filled in
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
)


def words_of(path: Path) -> Tokenizer:
    """The tokenizer and the chat template of a file.

    Raises:
        MissingDependency: tokenizers or gguf. InputError: `gguf-damaged`, `gguf-tokenizer`.
    """
    with MissingDependency.unless_found("tokenizers", extra="onnx", purpose="text in and out"):
        import tokenizers  # noqa: F401
    meta = fields(path)
    demand_whole(meta, str(path))
    tokens = meta["tokenizer.ggml.tokens"]
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = {number for number, token in enumerate(tokens) if token in _ENDS}.union(ends) - {None}
    sampling = {ours: meta.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
    texts: dict[str, Any] = {
        "tokenizer.json": json.loads(tokenizer_json(meta, str(path))),
        "tokenizer_config.json": tokenizer_config(meta, 0),
        "generation_config.json": {
            "eos_token_id": sorted(found),
            **{key: value for key, value in sampling.items() if value is not None},
        },
    }
    with tempfile.TemporaryDirectory(prefix="quantkit-words-") as folder:
        for name, content in texts.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        return Tokenizer(Path(folder))
