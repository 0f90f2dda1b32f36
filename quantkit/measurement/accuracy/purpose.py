"""Score a text encoder by its purpose, which follows from the files of its folder.

    modules.json with a Pooling     vectors: pooled, then Dense, LayerNorm, Normalize (sentence-transformers)
    …ForSequenceClassification      logits [C] of a text: classes, labels or numbers; a single logit ranks texts
    …ForTokenClassification         logits [C] of each token
    …ForQuestionAnswering           two logits of each token: the answer begins or ends here
    anything else                   vectors: the mean of the last hidden states

Every runtime returns last hidden states (some graphs return logits instead). The modules or the head after them are
computed in float32 from the source's weights, which no recipe quantizes. For a head, the model's own class runs with
its last hidden states replaced by these. Vectors are scored by retrieval, logits as classes or numbers.

Texts of equal length in tokens run together, so no text is padded and no mask is needed. The figures therefore do not
include effects of padding on a model with quantized inputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit import content, limits, machine
from quantkit.bundle import Decision, cached
from quantkit.calibrate.tokens.ids import LONGEST, TokenSet, token_ids
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.measurement.accuracy.labelled import About, Drawn, classification, cosine_row, retrieval
from quantkit.measurement.accuracy.outputs import outputs
from quantkit.measurement.rows import Data, Row
from quantkit.model.source.files import Module, modules_of
from quantkit.model.source.weights import checked_file, strict_json
from quantkit.passes import decision

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes import Scored


Array = NDArray[Any]

# the decision code for a score that differs from the model's purpose
ON_MEAN = "scored-on-mean"
# keys of older folders, in the order in which sentence-transformers concatenates the vectors
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HEADS: dict[str, Literal["text", "tokens", "spans"]] = {
    "ForSequenceClassification": "text",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "spans",
}
# purposes without an answer for a single text, or without a right or wrong answer
_OTHERS = ("ForMultipleChoice", "ForNextSentencePrediction")
_WEIGHTS = "model.safetensors"
_ACTIVATIONS = ("torch.nn.modules.activation.", "torch.nn.modules.linear.Identity")


@dataclass(frozen=True)
class Purpose:
    """Purpose of a model.

    Args:
        gives: kind of output: `vectors`, logits of a text, of each `tokens`, or of `spans` (begin and end).
        modules: modules after the transformer, for vectors; the first pools. Empty for the mean.
        pairs: True if an input is two texts, as for a reranker.
        prompt: text before every input.
        longest: largest number of tokens of a text.
        lower: True if texts are lowercased.
        problem: transformers' name for the kind of logits, such as `regression`; "" for one class of several.
        doubt: reason for scoring the mean although the model's purpose differs; "" without one.
    """

    gives: Literal["vectors", "text", "tokens", "spans"] = "vectors"
    modules: tuple[Module, ...] = ()
    pairs: bool = False
    prompt: str = ""
    longest: int = LONGEST
    lower: bool = False
    problem: str = ""
    doubt: str = ""

    @property
    def pooling(self) -> tuple[str, ...]:
        """Ways to pool a text's states into a vector; several vectors are concatenated."""
        return modes_of(self.modules[0].config) if self.modules else ("mean",)

    def on_mean(self, why: str) -> Purpose:
        """Return the same model, scored on the mean of its last hidden states."""
        return replace(self, gives="vectors", modules=(), pairs=False, prompt="", doubt=why)


def modes_of(config: dict[str, Any]) -> tuple[str, ...]:
    """List the pooling modes of a Pooling's config."""
    stated = config.get("pooling_mode")
    if stated is None:
        return tuple(mode for key, mode in _MODES.items() if config.get(key)) or ("mean",)
    return tuple(stated) if isinstance(stated, list) else (stated,)


def purpose_of(source: Source) -> Purpose:
    """Return the purpose of an encoder. Raises InputError: `modules-invalid`."""
    modules, name = modules_of(source.path), source.architecture
    purpose = Purpose()
    if modules:
        own = _json(source.path, "sentence_bert_config.json")
        shared = _json(source.path, "config_sentence_transformers.json")
        length, prompts = own.get("max_seq_length"), shared.get("prompts")
        prompt = prompts.get(shared.get("default_prompt_name")) if isinstance(prompts, dict) else None
        purpose = Purpose(
            longest=min(length, LONGEST) if isinstance(length, int) and length > 0 else LONGEST,
            prompt=prompt if isinstance(prompt, str) else "",
            lower=own.get("do_lower_case") is True,
        )
    if modules[1:]:
        unknown = next((why for module in modules if (why := _unknown(source.path, module))), "")
        kinds = [module.kind for module in modules if module.kind != "Dropout"]
        if not unknown and (kinds[:2] != ["Transformer", "Pooling"] or kinds.count("Pooling") > 1):
            unknown = (
                f"modules.json lists {', '.join(kinds)}; supported are a Transformer, a Pooling, and modules after it"
            )
        behind = tuple(module for module in modules[1:] if module.kind != "Dropout")
        return purpose.on_mean(unknown) if unknown else replace(purpose, modules=behind)
    head = next((gives for suffix, gives in _HEADS.items() if name.endswith(suffix)), None)
    if head is None:
        other = next((suffix for suffix in _OTHERS if name.endswith(suffix)), "")
        return replace(purpose, doubt=f"the logits of {name} are not scored") if other else purpose
    labels = source.config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else source.config.get("num_labels", 2)
    crossed = count == 1 or bool(modules) or "sentence_transformers" in source.config
    pairs = head == "spans" or (head == "text" and crossed)
    return replace(purpose, gives=head, pairs=pairs, problem=source.config.get("problem_type") or "")


def _json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        return {}
    where = f"{folder.name}: {name}"
    return strict_json(limits.read(checked_file(folder, name)), where, "modules-invalid", "modules-invalid")


def _unknown(folder: Path, module: Module) -> str:
    config, where = module.config, f"{module.folder} of modules.json"
    if module.kind in ("Transformer", "Normalize", "Dropout"):
        known = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
        odd = [key for key, value in known.items() if module.kind == "Normalize" and config.get(key, value) != value]
        return f"{where} has {odd[0]} {config[odd[0]]!r}" if odd else ""
    if module.kind == "Pooling":
        odd = [mode for mode in modes_of(config) if mode not in _MODES.values()]
        return f"{where} pools by {odd[0]!r}" if odd else ""
    if module.kind not in ("Dense", "LayerNorm"):
        return f"{module.type!r} of modules.json is not supported"
    if not (folder / module.folder / _WEIGHTS).is_file():
        return f"{where} has no {_WEIGHTS} (pickled weights are not loaded)"
    if module.kind == "Dense":
        if not str(config.get("activation_function") or _ACTIVATIONS[1]).startswith(_ACTIVATIONS):
            return f"{where} has activation {config['activation_function']!r}"
        if config.get("use_residual") or any(
            config.get(key) not in (None, "sentence_embedding") for key in ("module_input_name", "module_output_name")
        ):
            return f"{where} is not a plain linear layer"
    return ""


def pooled(states: Array, modes: Sequence[str], skip: int = 0) -> Array:
    """Pool the states [m, T, width] of texts into vectors [m, width times modes], without torch.

    `skip` is the number of leading prompt tokens to leave out.
    """
    kept = states[:, min(skip, states.shape[1] - 1) :]
    places = np.arange(states.shape[1] - kept.shape[1], states.shape[1], dtype=np.float32) + 1
    ways: dict[str, Callable[[], Array]] = {
        "cls": lambda: kept[:, 0],
        "max": lambda: kept.max(axis=1),
        "mean": lambda: kept.mean(axis=1),
        "mean_sqrt_len_tokens": lambda: kept.sum(axis=1) / np.float32(np.sqrt(kept.shape[1])),
        "weightedmean": lambda: np.einsum("mtw,t->mw", kept, places / places.sum()),
        "lasttoken": lambda: kept[:, -1],
    }
    return np.concatenate([ways[mode]() for mode in modes], axis=1)


class TextResults:
    """A function from last hidden states to the model's results on its scoring texts.

    Args:
        stream: original model.
        tokens: scoring data.
        vectors: True if only vectors can be computed, as on a device without torch.

    Raises InputError: `modules-invalid`: a module's weights do not match its config.
    """

    def __init__(self, stream: StreamedModel, tokens: TokenSet, *, vectors: bool = False) -> None:
        self.purpose = purpose_of(stream.source)
        self._head: _Head | None = None
        if self.purpose.gives != "vectors":
            why = f"a device scores {stream.source.architecture} only by its vectors"
            if not vectors:
                self._head, why = _Head.of(stream)
            if self._head is None:
                self.purpose = self.purpose.on_mean(why)
        self._behind = [_module(stream.source.path, module) for module in self.purpose.modules[1:]]
        self.ids, self.skip = _texts(self.purpose, stream.source, tokens)

    def decisions(self) -> list[Decision]:
        """Record a score unlike the model's purpose."""
        why = self.purpose.doubt
        reason = f"scored on the mean of the last hidden states, because {why}"
        return [decision("score", ON_MEAN, "score", reason)] if why else []

    @property
    def key(self) -> Any:
        """Part of a result's cache key beside the states, as JSON values; the source's hash covers the weights."""
        return [self.purpose.gives, self.skip, [[module.kind, module.config] for module in self.purpose.modules]]

    def __call__(self, states: Array, ids: Array) -> Array:
        """Return results [m, N], or [m, T, N] for tokens, from states [m, T, width] and ids [m, T] of texts."""
        if self._head is not None:
            return self._head(states, ids)
        return self.behind(pooled(states, self.purpose.pooling, self.skip))

    def behind(self, vectors: Array) -> Array:
        """Apply the modules after the pooling to vectors [m, N]."""
        if not self._behind:
            return vectors
        with torch.no_grad():
            results = torch.from_numpy(np.ascontiguousarray(vectors))
            for module in self._behind:
                results = module(results)
        return results.numpy()


def _texts(purpose: Purpose, source: Source, tokens: TokenSet) -> tuple[list[list[int]], int]:
    """Return the ids of the scoring texts, and the number of leading prompt tokens that are not pooled.

    Pairs become all left texts, then all right texts. For a reranker, each left text is joined with its own right text,
    and with the next pair's, which should rank lower.
    """
    if tokens.pairs is None:
        return tokens.ids.tolist(), 0
    tokenizer, pairs, longest = source.tokenizer(), tokens.pairs, min(purpose.longest, tokens.longest)
    left, right = ([f"{purpose.prompt}{text}" for text in side] for side in (pairs.left, pairs.right))
    if purpose.lower:
        left, right = ([text.lower() for text in side] for side in (left, right))
    if purpose.pairs:
        others = [*right[1:], *right[:1]]
        beside = [text for both in zip(right, others, strict=True) for text in both]
        return token_ids([text for text in left for _ in range(2)], tokenizer, longest, beside), 0
    skip = 0
    if purpose.prompt and purpose.modules and purpose.modules[0].config.get("include_prompt") is False:
        alone = token_ids([purpose.prompt], tokenizer, longest)[0]
        # the tokenizer's closing tokens follow the joined texts
        skip = len(alone) - (alone[-1] in tokenizer.all_special_ids)
    return token_ids([*left, *right], tokenizer, longest), skip


def _module(folder: Path, module: Module) -> Callable[[Tensor], Tensor]:
    from safetensors.torch import load

    if module.kind == "Normalize":
        return lambda vectors: torch.nn.functional.normalize(vectors, dim=-1)
    where = f"{folder.name}: {module.folder}/{_WEIGHTS}"
    try:
        stored = load(limits.read(checked_file(folder / module.folder, _WEIGHTS), limits.DATA))
        named = {name.rpartition(".")[2]: value.float() for name, value in stored.items()}
        if module.kind == "LayerNorm":
            layer: nn.Module = torch.nn.LayerNorm(int(module.config["dimension"]))
        else:
            size, to = (int(module.config[key]) for key in ("in_features", "out_features"))
            layer = torch.nn.Linear(size, to, bias=bool(module.config.get("bias", True)))
        layer.load_state_dict(named)
        if module.kind == "Dense":
            # sentence-transformers' default
            name = module.config.get("activation_function", "torch.nn.modules.activation.Tanh") or _ACTIVATIONS[1]
            layer = torch.nn.Sequential(layer, getattr(torch.nn, name.rpartition(".")[2])())
    except InputError:
        raise
    except Exception as problem:  # other libraries raise anything for a damaged file
        value, rule = " ".join(str(problem).split())[:160], "a module's tensors must match its config"
        remedy = "download the folder again"
        raise InputError("modules-invalid", where=where, value=value, rule=rule, remedy=remedy) from None
    return layer.eval()


class _Head:
    """A model's head, applied to last hidden states; the blocks of its model are placeholders."""

    def __init__(self, stream: StreamedModel) -> None:
        from quantkit.model.streaming.calls import stand_in
        from quantkit.model.structure.traced import blocks_of

        self.device, flow = stream.device, stream.flow
        self.model = stream.rest()
        self.base = stream.runs(self.model)
        blocks = blocks_of(self.model, stream.paths)
        stand_in(self.model, stream.paths, lambda index, hidden, _: flow.output(blocks[index], hidden))
        self._states: Tensor | None = None

    @classmethod
    def of(cls, stream: StreamedModel) -> tuple[_Head | None, str]:
        name = stream.source.architecture
        why = f"{name} changes its last hidden states before its head"
        try:
            head = cls(stream)
            return (head, "") if head._takes_states() else (None, why)
        except (InputError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as problem:
            return None, f"{why}: {' '.join(str(problem).split())[:120]}"

    def __call__(self, states: Array, ids: Array) -> Array:
        """Return logits [m, N], or of tokens [m, T, N]. One text at a time: some classes require a padding token
        otherwise."""
        logits = []
        for row, text in zip(torch.from_numpy(np.ascontiguousarray(states)), torch.from_numpy(ids), strict=True):
            self._states = row[None].to(self.device)
            output = self._run(self.model, text[None])
            spans = [output[key] for key in ("start_logits", "end_logits") if key in output]
            logits.append(torch.stack(spans, dim=-1) if spans else output["logits"])
        return torch.cat(logits).float().cpu().numpy()

    def _takes_states(self) -> bool:
        """Return True if replaced last hidden states reach the head unchanged."""
        ids = torch.arange(5, 13)[None].remainder(16)
        noted: list[tuple[Any, Tensor]] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            noted.extend([(module, first)] if isinstance(first, torch.Tensor) else [])

        hooks = [module.register_forward_hook(note) for module in self.base.modules() if module is not self.base]
        last = self._run(self.base, ids)[0]
        for hook in hooks:
            hook.remove()
        giving = [module for module, output in noted if output.data_ptr() == last.data_ptr()]
        if not giving:
            return False

        def replaced(module: nn.Module, _: Any, output: Any) -> Any:
            return (self._states, *output[1:]) if isinstance(output, tuple) else self._states

        giving[-1].register_forward_hook(replaced)
        self._states = torch.randn(last.shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        return torch.equal(self._run(self.base, ids)[0], self._states)

    def _run(self, model: nn.Module, ids: Tensor) -> Any:
        from quantkit.model.streaming.calls import forward, uncached

        with torch.no_grad(), uncached(self.model):
            return forward(model, ids.to(self.device))


# logit of a place beyond a text's end; its probability is 0
_NOWHERE = -1e9


def result_rows(
    original: StreamedModel,
    candidate: Scored,
    tokens: TokenSet,
    result: TextResults,
    about: About,
    progress: Callable[[float], None] | None = None,
) -> list[Row]:
    """Return the accuracy rows of a candidate against its original; `result` must be made for `tokens`.

    Raises InputError, GateError: those of `labelled`.
    """
    tell = progress or (lambda done: None)
    _original(original, result)
    tell(0.5)
    after = results(candidate, result.ids, result)
    tell(1.0)
    return rows_of(original, after, tokens, result, about)


def rows_of(
    original: StreamedModel, after: Sequence[Array], tokens: TokenSet, result: TextResults, about: About
) -> list[Row]:
    """Return `result_rows` from a candidate's results `after`, [N] or [T, N] for each text.

    Raises InputError, GateError: those of `labelled`; ValueError: results of another shape than the original's.
    """
    before, pairs = _original(original, result), tokens.pairs
    count = len(before) if pairs is None else len(pairs.left)
    if pairs is not None:
        data = Data(set=pairs.name, split=pairs.split, sha256=pairs.sha256, items=max(1, count))
        about = replace(about, data=data)
    else:
        about = replace(about, data=about.data.model_copy(update={"items": count}))
    if [one.shape for one in before] != [other.shape for other in after]:
        raise ValueError(f"results of shape {after[0].shape if len(after) else ()}")
    if result.purpose.gives == "vectors":
        one, other = np.stack(before), np.stack(after)
        if pairs is not None:
            return retrieval(one[:count], one[count:], other[:count], other[count:], about=about)
        one, other = one.astype(np.float64), other.astype(np.float64)
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return [cosine_row((one * other).sum(axis=1) / lengths, Drawn(count, "sequence"), about)]
    if result.purpose.gives == "text":
        return _of_texts(np.stack(before), np.stack(after), result.purpose.problem, about)
    texts = np.repeat(np.arange(len(before)), [len(text) for text in before])
    if result.purpose.gives == "tokens":
        sides = np.concatenate(before), np.concatenate(after)
        return classification(sides[0], sides[1], None, about=about, unit="token", clusters=texts)
    places = max(len(text) for text in before)
    # logits [T, N] of a text become [N, places]
    filled = [
        np.concatenate([np.pad(one.T, ((0, 0), (0, places - len(one))), constant_values=_NOWHERE) for one in side])
        for side in (before, after)
    ]
    return classification(
        filled[0], filled[1], None, about=about, unit="place", clusters=np.repeat(np.arange(len(before)), 2)
    )


def _of_texts(before: Array, after: Array, problem: str, about: About) -> list[Row]:
    """Return rows of logits [n, C].

    Classes are scored by the predicted class, labels each as yes or no, a single logit by the order of two texts, and
    numbers by their change.
    """
    if problem == "multi_label_classification":
        # sigmoid of a logit x equals softmax of the logits 0 and x
        both = [np.stack([np.zeros(side.size, side.dtype), side.ravel()], axis=1) for side in (before, after)]
        texts = np.repeat(np.arange(len(before)), before.shape[1])
        return classification(both[0], both[1], None, about=about, unit="label", clusters=texts)
    if before.shape[1] == 1:
        both = [side[: len(side) // 2 * 2].reshape(-1, 2) for side in (before, after)]
        ranked = classification(both[0], both[1], None, about=about, unit="pair")
        # a single number is no probability: only the order counts
        order = [row for row in ranked if row.name != "accuracy.kl" and "surer_than" not in row.settings]
        return [*order, *outputs({"logits": before}, {"logits": after}, about=about)]
    if problem == "regression":
        return outputs({"logits": before}, {"logits": after}, about=about)
    return classification(before, after, None, about=about, unit="text")


def _original(model: StreamedModel, result: TextResults) -> Sequence[Array]:
    import torch

    key = json.dumps([result.key, result.ids]).encode()
    place = kept_at(model, hashlib.sha256(b"result" + key).hexdigest())
    kept = cached.read_tensor(place)
    lengths = [1 if result.purpose.gives in ("vectors", "text") else len(text) for text in result.ids]
    if kept is None or kept.shape[0] != sum(lengths):
        fresh = results(model, result.ids, result)
        flat = [result_.reshape(length, -1) for result_, length in zip(fresh, lengths, strict=True)]
        kept = torch.from_numpy(np.concatenate(flat))
        cached.keep_tensor(place, kept)
    parts = np.split(np.asarray(kept.numpy()), np.cumsum(lengths)[:-1])
    return [part[0] if result.purpose.gives in ("vectors", "text") else part for part in parts]


def results(model: Scored, ids: Sequence[Sequence[int]], of: Callable[[Array, Array], Array]) -> list[Array]:
    """Run texts, equal lengths together; `of` maps states [m, T, width] and ids [m, T] to results [m, ...]."""
    by_length: dict[int, list[int]] = {}
    for place, text in enumerate(ids):
        by_length.setdefault(len(text), []).append(place)
    by_place: dict[int, Array] = {}
    for places in by_length.values():
        # every call of a stream reads all blocks again
        step = model.together or len(places)
        for start in range(0, len(places), step):
            some = places[start : start + step]
            same = np.asarray([ids[place] for place in some], dtype=np.int64)
            # a candidate may have its own head
            headed = isinstance(of, TextResults) and of.purpose.gives != "vectors" and model.headed
            own = model.logits(same) if headed else None
            by_place |= zip(some, of(model.encode(same), same) if own is None else own, strict=True)
    return [by_place[place] for place in range(len(ids))]


def embeddings(model: Scored, ids: Sequence[Sequence[int]], pooling: Sequence[str] = ("mean",), skip: int = 0) -> Array:
    """Return pooled last hidden states [n, width] of texts, float32, without normalization."""
    vectors = results(model, ids, lambda states, _: pooled(states, pooling, skip))
    return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)


# version of the block-by-block run; a new number discards cached states. Version 1 gave wrong states for classes that
# share a cache or arguments between chunks
_STREAM = 2


def kept_at(model: StreamedModel, digest: str) -> Path:
    """Return the cache path of an original's states; `digest` is the hash of the ids."""
    import torch

    key = {
        "source": model.source.sha256,
        "ids": digest,
        "stream": _STREAM,
        "versions": machine.versions(),
        "isa": machine.isa(),
        "threads": torch.get_num_threads(),
    }
    if model.device.type != "cpu":
        key["device"] = [torch.cuda.get_device_name(model.device), torch.get_float32_matmul_precision()]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "states" / f"{name}.safetensors"
