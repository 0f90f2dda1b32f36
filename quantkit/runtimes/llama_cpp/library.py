"""llama.cpp through its C interface (`llama.h`, by llama-cpp-python): a file opened, and its tokenizer."""

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
# how the makers of a model sample: their name -> ours
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}
# how threads wait for one another, read once when the OpenMP library is loaded: how often one looks before it sleeps
_WAITS = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "10000"}


class LlamaLibrary:
    """The library, which says what it does to `said` instead of to the screen."""

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
            if level >= 3:  # GGML_LOG_LEVEL_WARN and graver
                self.said.append(line.decode(errors="replace").strip())
                del self.said[:-20]

        self._hear = hear  # the library keeps a pointer alone
        llama_cpp.llama_log_set(hear, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    @property
    def features(self) -> str:
        """The instruction sets that it was compiled for and found here: `AVX2 = 1 | FMA = 1 ...`."""
        return str(self.api.llama_print_system_info().decode())


@contextmanager
def _waiting_shortly() -> Iterator[None]:
    """Threads wait awake, but not for long, whatever quantkit asks of OpenMP besides."""
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
    """The library, loaded once. Raises MissingDependency."""
    return LlamaLibrary()


class Loaded:
    """A file that llama.cpp has loaded, freed with this object.

    Args:
        path: of it.
        words: only its tokenizer.

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
        # at the interpreter's end too, while the library is still there
        weakref.finalize(self, self.api.llama_model_free, self.model)
        self.vocabulary: Any = self.api.llama_model_get_vocab(self.model)

    def refused(self, value: str) -> InputError:
        """`gguf-unreadable`, with what the library said first."""
        said = next((line for line in self._library.said if "error" in line or "unknown" in line), "")
        return InputError(
            "gguf-unreadable",
            str(self.path),
            f"{value}{f': {said[:200]}' if said else ''}" if self.path.is_file() else "no such file",
            "llama.cpp loads it",
            "`quantkit verify` says whether the file differs; else update llama-cpp-python, or export again",
        )

    def said(self, key: str) -> str | None:
        """A field of the file's metadata, as text."""
        length = self.api.llama_model_meta_val_str(self.model, key.encode(), ctypes.create_string_buffer(1), 1)
        if length < 0:
            return None
        room = ctypes.create_string_buffer(length + 1)
        self.api.llama_model_meta_val_str(self.model, key.encode(), room, length + 1)
        return room.value.decode(errors="replace")


class Vocabulary:
    """A file's tokenizer and chat template, as llama.cpp reads them.

    Args:
        path: of the file. Raises as `Loaded`.
    """

    def __init__(self, path: Path) -> None:
        self._loaded = Loaded(path, words=True)
        self._api, self._words = self._loaded.api, self._loaded.vocabulary

    def encode(self, written: str, *, special: bool = True) -> list[int]:
        """Token ids; special tokens in the text are taken as such."""
        raw = written.encode()
        room = (self._api.llama_token * (len(raw) + 8))()
        count = self._api.llama_tokenize(self._words, raw, len(raw), room, len(room), special, True)
        if count < 0:
            raise InputError("no-tokenizer", str(self._loaded.path), f"{-count} tokens of {len(raw)} bytes")
        return list(room[:count])

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        if not ids:
            return ""
        given = (self._api.llama_token * len(ids))(*ids)
        room = ctypes.create_string_buffer(64 * len(ids) + 64)
        count = self._api.llama_detokenize(self._words, given, len(ids), room, len(room), True, False)
        if count < 0:  # so much room it needs
            room = ctypes.create_string_buffer(-count)
            count = self._api.llama_detokenize(self._words, given, len(ids), room, len(room), True, False)
        return room.raw[: max(count, 0)].decode(errors="replace")

    def chat(self, prompt: str) -> str:
        """One message of a user in the file's chat template.

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
        """The tokens that end a text."""
        count = self._api.llama_vocab_n_tokens(self._words)
        return {number for number in range(count) if self._api.llama_vocab_is_eog(self._words, number)}

    @cached_property
    def generation(self) -> dict[str, Any]:
        """How the model's makers sample."""
        found = {ours: self._loaded.said(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
        return {key: float(value) for key, value in found.items() if value is not None}
