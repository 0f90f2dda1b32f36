"""llama.cpp on the CPU: runs a bundle's `gguf/model.gguf` as its own programs do. Needs llama-cpp-python; no torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import MissingDependency, install
from quantkit.runtimes import FileRuntime
from quantkit.runtimes.llama_cpp.library import SAMPLING, Vocabulary
from quantkit.runtimes.llama_cpp.session import FOLDER, MODEL, LlamaModel

if TYPE_CHECKING:
    from quantkit.runtimes.generate import TextTokens
    from quantkit.runtimes.text import Tokenizer

# tokens that end a text, which llama.cpp also recognizes by name (llama-vocab.cpp, `special_eog_ids`)
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>"),
    # tokens for code completion over a repository; they end a text too
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
)


class LlamaCpp(FileRuntime):
    """Runtime `llama_cpp`."""

    name = floats = "llama_cpp"
    imports, extra, order, cache = ("llama_cpp",), "gguf", 2, "float16"
    packages = ("llama-cpp-python", "gguf")
    file = f"{FOLDER}/{MODEL}"
    absent = ("bundle-without-gguf", "this runtime runs the GGUF export")
    model = LlamaModel

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason as `Runtime.why_not_here` does."""
        if machine.has("llama_cpp"):
            return None
        return f"llama-cpp-python is not installed; {install('gguf')} (it compiles for minutes)"

    def context(self, folder: Path) -> int:
        """Read it from the file, also without llama.cpp: only a device may have it.

        Raises:
            InputError: `gguf-damaged`. MissingDependency: the `gguf` package.
        """
        from quantkit.model.source.gguf.file import fields

        stated = fields(folder / MODEL)
        return int(stated.get(f"{stated.get('general.architecture')}.context_length", 4096))

    def tokenizer(self, bundle: Bundle) -> TextTokens:
        """Return llama.cpp's tokenizer, or ours if only a device has llama.cpp."""
        path = self.folder(bundle) / MODEL
        return words_of(path) if self.why_not_here() else Vocabulary(path)


def words_of(path: Path) -> Tokenizer:
    """Read the tokenizer and the chat template of a file without llama.cpp.

    Raises:
        MissingDependency: tokenizers or gguf. InputError: `gguf-damaged`, `gguf-tokenizer`.
    """
    from quantkit.model.source.gguf.tokenizer import demand_whole, tokenizer_config, tokenizer_json
    from quantkit.runtimes.text import Tokenizer

    with MissingDependency.unless_found("tokenizers", extra="onnx", purpose="text in and out"):
        import tokenizers  # noqa: F401
    from quantkit.model.source.gguf.file import fields

    meta = fields(path)
    demand_whole(meta, str(path))
    tokens = meta["tokenizer.ggml.tokens"]
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ending = {number for number, token in enumerate(tokens) if token in _ENDS}.union(ends) - {None}
    sampling = {ours: meta.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
    texts: dict[str, Any] = {
        "tokenizer.json": json.loads(tokenizer_json(meta, str(path))),
        "tokenizer_config.json": tokenizer_config(meta, 0),
        "generation_config.json": {
            "eos_token_id": sorted(ending),
            **{key: value for key, value in sampling.items() if value is not None},
        },
    }
    with tempfile.TemporaryDirectory(prefix="quantkit-words-") as folder:
        for name, content in texts.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        return Tokenizer(Path(folder))


RUNTIME = LlamaCpp()
