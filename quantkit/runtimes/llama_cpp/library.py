"""Open a GGUF file, and its tokenizer, through llama.cpp's C interface (`llama.h`, from llama-cpp-python)."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes import text

_TEMPLATE = "tokenizer.chat_template"
# sampling settings of a model's makers: name in the file -> name here
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}
# how often a waiting thread polls before it sleeps; OpenMP reads it once, when it is loaded
_WAITS = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "10000"}


class LlamaLibrary:
    """The library; its messages go to `said` instead of the screen."""

    def __init__(self) -> None:
        try:
            with _waiting_shortly():
                import llama_cpp
        except ImportError:
            raise MissingDependency("llama_cpp", extra="gguf", purpose="running gguf/model.gguf") from None
        self.api: Any = llama_cpp
        self.said: list[str] = []

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def hear(level: int, line: bytes, _: object) -> None:
            if level >= 3:  # GGML_LOG_LEVEL_WARN and above
                self.said.append(line.decode(errors="replace").strip())
                del self.said[:-20]

        self._hear = hear  # the library keeps only a pointer
        llama_cpp.llama_log_set(hear, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    @property
    def features(self) -> str:
        """Instruction sets of its build that this CPU has: `AVX2 = 1 | FMA = 1 ...`."""
        return str(self.api.llama_print_system_info().decode())


@contextmanager
def _waiting_shortly() -> Iterator[None]:
    """Make OpenMP threads poll for a short time, independent of other settings for OpenMP."""
    before = {name: os.environ.pop(name, None) for name in _WAITS}
    os.environ.update({name: value for name, value in _WAITS.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@cache
def library() -> LlamaLibrary:
    """Load the library once. Raises MissingDependency."""
    return LlamaLibrary()


class Loaded:
    """A file loaded by llama.cpp, freed with this object.

    Args:
        path: path of the file.
        words: whether to load only its tokenizer.

    Raises:
        MissingDependency: llama-cpp-python. InputError: `gguf-unreadable`.
    """

    def __init__(self, path: Path, *, words: bool = False) -> None:
        self._library = library()
        self.api = self._library.api
        self.path = path
        settings = self.api.llama_model_default_params()
        settings.vocab_only = words
        del self._library.said[:]
        self.model: Any = self.api.llama_model_load_from_file(str(path).encode(), settings) if path.is_file() else None
        if not self.model:
            raise self.refused("it does not load")
        # also at the interpreter's exit, while the library is still loaded
        weakref.finalize(self, self.api.llama_model_free, self.model)
        self.vocabulary: Any = self.api.llama_model_get_vocab(self.model)

    def refused(self, value: str) -> InputError:
        """Make the error `gguf-unreadable` with the library's first message."""
        message = next((line for line in self._library.said if "error" in line or "unknown" in line), "")
        return InputError(
            "gguf-unreadable",
            str(self.path),
            f"{value}{f': {message[:200]}' if message else ''}" if self.path.is_file() else "no such file",
            "llama.cpp loads it",
            "`quantkit verify` shows whether the file has changed; else update llama-cpp-python, or export again",
        )

    def said(self, key: str) -> str | None:
        """Read a field of the file's metadata as text."""
        length = self.api.llama_model_meta_val_str(self.model, key.encode(), ctypes.create_string_buffer(1), 1)
        if length < 0:
            return None
        room = ctypes.create_string_buffer(length + 1)
        self.api.llama_model_meta_val_str(self.model, key.encode(), room, length + 1)
        return room.value.decode(errors="replace")


class Vocabulary:
    """Tokenizer and chat template of a file, as llama.cpp reads them.

    Args:
        path: path of the file. Raises as `Loaded`.
    """

    def __init__(self, path: Path) -> None:
        self._loaded = Loaded(path, words=True)
        self._api, self._words = self._loaded.api, self._loaded.vocabulary

    def encode(self, written: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text; names of special tokens in the text become special tokens."""
        raw = written.encode()
        room = (self._api.llama_token * (len(raw) + 8))()
        count = self._api.llama_tokenize(self._words, raw, len(raw), room, len(room), special, True)
        if count < 0:
            raise InputError("no-tokenizer", str(self._loaded.path), f"{-count} tokens of {len(raw)} bytes")
        return list(room[:count])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        if not ids:
            return ""
        tokens = (self._api.llama_token * len(ids))(*ids)
        room = ctypes.create_string_buffer(64 * len(ids) + 64)
        count = self._api.llama_detokenize(self._words, tokens, len(ids), room, len(room), True, False)
        if count < 0:  # minus the size that it needs
            room = ctypes.create_string_buffer(-count)
            count = self._api.llama_detokenize(self._words, tokens, len(ids), room, len(room), True, False)
        return room.raw[: max(count, 0)].decode(errors="replace")

    def chat(self, prompt: str) -> str:
        """Put a user's message into the file's chat template.

        Raises:
            InputError: `no-chat-template`.
        """
        tokens = {name: self._token(f"tokenizer.ggml.{name[:3]}_token_id") for name in ("bos_token", "eos_token")}
        return text.rendered(self._loaded.said(_TEMPLATE), prompt, tokens)

    def _token(self, key: str) -> str | None:
        number = self._loaded.said(key)
        if number is None or not number.isdecimal():
            return None
        return str(self._api.llama_vocab_get_text(self._words, int(number)).decode(errors="replace"))

    @cached_property
    def ends(self) -> set[int]:
        """Tokens for the end of a text."""
        count = self._api.llama_vocab_n_tokens(self._words)
        return {number for number in range(count) if self._api.llama_vocab_is_eog(self._words, number)}

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Sampling settings recommended by the model's makers."""
        settings = {ours: self._loaded.said(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
        return {key: float(value) for key, value in settings.items() if value is not None}
