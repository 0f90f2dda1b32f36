"""Which files of a folder are the model, and the hash over them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quantkit.model.source.hashes import at_once, file_sha256
from quantkit.model.source.modules import files_of_modules
from quantkit.model.source.weights import INDEX, Weights

# beside the weights; no other text, which may be the log of this very process
PATTERNS = ("*.json", "*vocab*.txt", "*merges*.txt", "*.model", "*.jinja", "*.tiktoken")


def files_of(path: Path, weights: Weights, trust: bool) -> list[str]:
    """Names of config, weights and tokenizer files, sorted, and of what stands behind it in folders of its own; of the
    model's own code too where that is trusted."""
    patterns = (*PATTERNS, "*.py") if trust else PATTERNS
    names = {found.name for pattern in patterns for found in path.glob(pattern) if found.is_file()}
    if weights.shards == ["model.safetensors"]:
        names.discard(INDEX)
    return sorted(names | set(weights.shards) | {name for _, name in files_of_modules(path)})


def identity(path: Path, weights: Weights, trust: bool) -> str:
    """The hash of a model: over (name, sha256) of its files."""
    files = files_of(path, weights, trust)
    lines = map("{} {}\n".format, files, at_once(file_sha256, [path / name for name in files]))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
