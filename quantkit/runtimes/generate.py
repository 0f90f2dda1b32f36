"""Generate text with a model that has a cache, in any runtime, without transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit import limits, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError, one

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
# code of the errors of images in a prompt
IMAGES = "generate-images"
# (number of a scored sequence, its consecutive positions) -> logits [P, V]
Scores = Callable[[int, slice], "Tensor"]


class Decoder(Protocol):
    """Interface of a loaded decoder: `onnxruntime.session.OnnxModel`, `tensorrt.decode.EngineModel`."""

    def state(self, batch: int, capacity: int) -> Any:
        """Make room for `batch` sequences of up to `capacity` tokens."""
        ...

    def run(self, state: Any, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Return logits [B, S or keep, vocabulary] of tokens [B, S], which continue the sequences of a state."""
        ...


class TextTokens(Protocol):
    """Interface of a tokenizer: `text.Tokenizer` (files beside a model), `llama_cpp.library.Vocabulary` (GGUF)."""

    @property
    def generation(self) -> Mapping[str, Any]:
        """Sampling settings recommended by the model's makers."""

    @property
    def ends(self) -> set[int]:
        """Tokens for the end of a text."""

    def encode(self, text: str, /, *, special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of tokens, without special tokens."""
        ...

    def chat(self, prompt: str, /) -> str:
        """Put a user's message into the model's chat template."""
        ...


class _Named(Protocol):
    """Interface of a runtime for `demand_images`."""

    name: str
    images: bool


@dataclass(frozen=True)
class Sampling:
    """Rule for choosing the next token; values that are not set come from the model's generation_config.json."""

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    generator: np.random.Generator = field(default_factory=np.random.default_rng)

    def choose(self, logits: Array) -> Array:
        """Choose a token for every sequence: logits [B, V] -> ids [B]."""
        if not self.sample:
            return np.asarray(logits.argmax(axis=-1))
        return np.array([self._draw(row) for row in logits.astype(np.float64)])

    def _draw(self, logits: Array) -> int:
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        shifted = (logits[order] - logits[order[0]]) / max(self.temperature, 1e-6)
        chances = np.exp(shifted)
        chances /= chances.sum()
        # the fewest tokens whose probabilities sum to top_p, and at least one
        kept = np.searchsorted(np.cumsum(chances), self.top_p) + 1
        chances = chances[:kept] / chances[:kept].sum()
        return int(order[self.generator.choice(len(chances), p=chances)])


def demand_decoder(bundle: Bundle) -> None:
    """Refuse a bundle without a decoder. Raises InputError `not-a-decoder`."""
    kind = bundle.manifest.model.kind
    if kind != "decoder":
        raise InputError("not-a-decoder", str(bundle.path), one(kind), "only decoders generate text")
    if bundle.manifest.hears:
        rule, remedy = "it writes what it hears", f"quantkit generate {bundle.path} --audio FILE.wav"
        raise InputError("generate-audio", str(bundle.path), "a model of speech", rule, remedy)


def demand_alone(bundle: Bundle, rule: str) -> None:
    """Refuse the checkpoint of a decoder beside an encoder. Raises InputError `architecture-unsupported`."""
    if json.loads(limits.read(bundle.model_folder / "config.json")).get("is_encoder_decoder"):
        raise InputError("architecture-unsupported", str(bundle.path), "an encoder and a decoder", rule)


def demand_images(
    bundle: Bundle, runtime: _Named, images: Sequence[Path], device: str | None = None
) -> list[NDArray[np.uint8]]:
    """Read images [height, width, 3] before a model is loaded.

    Raises InputError: `generate-images` for a model of text, for a runtime that takes none, on a device, or for what is
    no image; `file-missing`, `file-unreadable`.
    """
    from quantkit.calibrate.sets.images import read_picture

    value, rule, remedy = "", "", "leave --image out"
    if not bundle.manifest.sees:
        value, rule = f"{bundle.manifest.model.name} takes text", "only a vision-language model takes images"
    elif device is not None:
        value, rule, remedy = f"on {device}", "a device receives tokens alone", f"{remedy}, or --on"
    elif not runtime.images:
        value, rule, remedy = f"runtime {runtime.name}", "images go through transformers", "--runtime torch"
    if value:
        raise InputError(IMAGES, "--image", value, rule, remedy)
    return [read_picture(path, IMAGES) for path in images]


def demand_tokens(count: int) -> None:
    """Refuse a prompt without tokens. Raises InputError `prompt-empty`."""
    if not count:
        raise InputError("prompt-empty", "--prompt", "no token", "a prompt needs at least one token")


def no_cache(where: str) -> InputError:
    """Make the error for a decode step of an encoder."""
    return InputError("not-a-decoder", where, "an encoder", "only decoders have a cache")


def too_long(where: str, tokens: int, rule: str, remedy: str = "") -> InputError:
    """Make the error for more tokens than fit."""
    return InputError("prompt-too-long", where, f"{tokens} tokens", rule, remedy)


def generated(
    bundle: Bundle,
    words: Callable[[], TextTokens],
    load: Callable[[], Decoder],
    prompt: str,
    *,
    new_tokens: int,
    sample: bool,
    seed: int,
    chat: bool,
) -> dict[str, Any]:
    """Continue a prompt; the other arguments are those of `Runtime.generate`.

    Args:
        words: function that returns the tokenizer.
        load: function that returns the model, called after the prompt is checked.

    Returns:
        `text`, `tokens` (their number), `seconds`, `first_token_s`, `tokens_per_s` of later steps, `notes`: facts
        about the runtime that the user should know.

    Raises:
        InputError: `not-a-decoder`, `no-tokenizer`, `prompt-empty`, `prompt-too-long`.
    """
    demand_decoder(bundle)
    tokenizer = words()
    ids = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt, special=not chat)
    demand_tokens(len(ids))
    model = load()
    settings = tokenizer.generation
    sampling = Sampling(
        sample,
        float(settings.get("temperature") or 1.0),
        int(settings.get("top_k", 50) or 0),
        float(settings.get("top_p") or 1.0),
        np.random.default_rng(seed),
    )
    new: list[int] = []
    started = first = time.perf_counter()
    for tokens in stream(model, np.array([ids]), new_tokens, sampling):
        first = first if new else time.perf_counter()
        if int(tokens[0]) in tokenizer.ends:
            break
        new.append(int(tokens[0]))
    ended = time.perf_counter()
    return {
        "text": tokenizer.decode(new),
        "tokens": len(new),
        "seconds": ended - started,
        "first_token_s": first - started,
        "tokens_per_s": (len(new) - 1) / (ended - first) if len(new) > 1 else None,
        **({"notes": notes} if (notes := list(getattr(model, "notes", ()))) else {}),
    }


def stream(
    model: Decoder, ids: Array, new_tokens: int, sampling: Sampling, mask: Array | None = None
) -> Iterator[Array]:
    """Yield the next tokens [B], one step after another, for prompts [B, S], padded on the left where `mask` is 0."""
    state = model.state(ids.shape[0], ids.shape[1] + new_tokens)
    logits = model.run(state, ids, mask, keep=1)[:, -1]
    for number in range(new_tokens):
        tokens = sampling.choose(logits)
        yield tokens
        if number + 1 < new_tokens:
            logits = model.run(state, tokens[:, None])[:, -1]


def fed(model: Decoder, ids: Tensor, at_once: int | None = None) -> Scores:
    """Return the scores of a model with a cache for ids [n, T]; parts of a sequence continue in the cache.

    Args:
        at_once: largest number of tokens in one run; None: a whole part.
    """
    import torch

    state: Any = None
    at = (0, 0)

    def scores(index: int, part: slice) -> Tensor:
        nonlocal state, at
        if state is None or at[0] != index or part.start < at[1]:
            state, at = model.state(1, ids.shape[1]), (index, 0)
        tokens = ids[index : index + 1, at[1] : part.stop]
        few = tokens.split(at_once or tokens.shape[1], dim=1)
        at = index, part.stop
        logits = torch.cat([torch.from_numpy(model.run(state, some.numpy())[0]) for some in few])
        return logits[part.start - part.stop :]

    return scores


# ids of a text, and the number of those before its continuation; (log-likelihood of that in nats, whether each token of
# it is the most likely one)
Asked = tuple[Sequence[int], int]
Likelihood = tuple[float, bool]
# ids of a prompt, the most new tokens, and a function of the new ones that ends the text
Prompt = tuple[Sequence[int], int, Callable[[Sequence[int]], bool]]


class Answerer(Protocol):
    """Interface of a side that answers the items of tasks.

    Attributes:
        at_once: tokens of the texts that it is given at a time.
    """

    at_once: int

    def likelihoods(self, texts: Sequence[Asked]) -> list[Likelihood]:
        """Return how likely each text goes on as it does."""

    def written(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the most likely tokens after each prompt, one after another."""


class LocalAnswers:
    """Answers from models that are opened here, each at its first use.

    Args:
        scored: function that opens the model to score.
        decoder: function that opens it with a cache.
    """

    at_once = 8192

    def __init__(self, scored: Callable[[], Any], decoder: Callable[[], Decoder]) -> None:
        self._opens = scored, decoder
        self._scored: Any = None
        self._decoder: Decoder | None = None

    @property
    def scored(self) -> Any:
        """Model to score, open."""
        if self._scored is None:
            self._scored = self._opens[0]()
        return self._scored

    def likelihoods(self, texts: Sequence[Asked]) -> list[Likelihood]:
        """Return how likely each text goes on; padding stands on the right, where a decoder does not look."""
        import torch

        length = max(len(tokens) for tokens, _ in texts) - 1
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        for row, (tokens, _) in zip(ids, texts, strict=True):
            row[: len(tokens) - 1] = torch.tensor(tokens[:-1])
        scores, answers = self.scored.scores(ids), []
        for index, (tokens, first) in enumerate(texts):
            chances = scores(index, slice(first - 1, len(tokens) - 1)).float().log_softmax(-1)
            following = torch.tensor(tokens[first:], device=chances.device)
            right = chances.gather(-1, following.unsqueeze(-1)).sum()
            answers.append((float(right), bool((chances.argmax(-1) == following).all())))
        return answers

    def written(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the most likely tokens after each prompt."""
        if self._decoder is None:
            self._decoder = self._opens[1]()
        texts = []
        for ids, count, ended in prompts:
            new: list[int] = []
            for tokens in stream(self._decoder, np.array([ids]), count, Sampling()):
                new.append(int(tokens[0]))
                if ended(new):
                    break
            texts.append(new)
        return texts


class FileModel:
    """Common part of models that a runtime reads from a file; see `runtimes.Session`.

    Attributes:
        place: path of the file, for errors.
        meta: metadata that our exporter wrote into it.
        cache_bytes: bytes of cache for one token of one sequence, all layers.
        features: size of the output at a position: logits, or an encoder's last hidden state.
        accuracy_level: precision of quantized products: 4 rounds activations to int8, 0 computes in float32.
    """

    ways: Mapping[str, float] = MappingProxyType({})
    meta: Mapping[str, str] = MappingProxyType({})
    notes: Sequence[str] = ()
    prompt_rows, headed, together, accuracy_level, cache_bytes = 0, False, 32, 0, 0
    place: Path
    context: int
    features: int
    weight_bytes: int

    @property
    def where(self) -> dict[str, str]:
        """Name of the CPU, for rows of measurements."""
        return machine.device()

    def scores(self: Any, ids: Tensor, at_once: int | None = None) -> Scores:
        """Return scores as `runtimes.Scored.scores` does."""
        return fed(self, ids, at_once)

    def demand_positions(self, tokens: int) -> None:
        """Refuse sequences longer than the model's context. Raises InputError `prompt-too-long`."""
        if tokens > self.context:
            remedy = "shorten the prompt, or ask for fewer new tokens"
            raise too_long(str(self.place), tokens, f"the context holds {self.context}", remedy)

    def demand_room(self, batch: int, tokens: int, need: float) -> None:
        """Refuse shapes beyond the free memory. Raises InputError `out-of-memory`."""
        free = machine.memory_available()
        if need > 0.9 * free:
            where, value, rule = (
                f"batch {batch}, {tokens} tokens",
                f"{need / 1e9:.2f} GB",
                f"{free / 1e9:.2f} GB are free",
            )
            remedy = "use a smaller batch or a shorter context"
            raise InputError("out-of-memory", where, value, rule, remedy)

    def work(self) -> dict[str, Any]:
        """Return the figures of `runtimes.Session.work`, which the exporter wrote into the file."""

        def noted(name: str) -> float:
            return float(self.meta.get(f"quantkit.{name}", 0))

        return {
            "weight_bytes": noted("step_bytes") or self.weight_bytes,
            "kv_bytes_per_token": self.cache_bytes,
            "flops_per_token": noted("flops"),
            "attention_flops": noted("attention_flops"),
            "head_flops": noted("head_flops"),
            "float_bytes": noted("float_bytes"),
            "float_head_flops": noted("float_head_flops"),
            "io_bytes_per_token": 4.0 * self.features,
            "many_rows": self.prompt_rows,
            "many_bytes": noted("prompt_bytes"),
            "compute": "int8" if self.accuracy_level == 4 else "fp32",
        }
