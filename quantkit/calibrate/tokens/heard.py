"""Sequences of a set of recordings: the ids of each transcript, and what the encoder hears with them.

    ids     <start> <settings of the task> transcript <end>, and again    all as long as the longest one
    heard   features of the recording, by the model's own feature extractor

The set has no splits: every second recording, in the order of the set, calibrates, and the others score. Where nothing
calibrates, all of them score. A short sequence is filled up with its own ids: those calibrate, and do not score. Of a
recording without transcript, the original model writes one, greedily; it is not counted for word error rates.

Without recordings, checks compare text beside noise, and nothing is scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quantkit import content, limits
from quantkit.calibrate.sets.recordings import CODE, RULE, Recording, recordings
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.source import pretrained
from quantkit.model.source.weights import strict_json

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.model.source.open import Source

# rate where an extractor names none; tokens of a transcript where a model has no limit, and in front of one
_RATE, LONGEST, BEFORE = 16000, 448, 8
_EXTRACTORS = ("preprocessor_config.json", "processor_config.json")
Part = Literal["calib", "eval", "all"]


def hears_set(reference: str) -> bool:
    """Tell whether a calibration set may hold recordings: a folder without a card, or a .jsonl file."""
    if not content.is_path(reference):
        return False
    path = content.find("calibration", reference)
    return (path.is_dir() and not (path / "card.yaml").is_file()) or path.suffix.lower() == ".jsonl"


def demand_recordings(reference: str, source: Source, *, calibrate: bool) -> bool:
    """Return whether the recipe's set has recordings; refuse a set of text, and a recipe that needs data without any.

    Raises InputError: `calibration-audio`.
    """
    if hears_set(reference):
        return True
    if content.is_path(reference):
        raise InputError(CODE, reference, "no set of recordings", RULE, "--calibration FOLDER of WAV files")
    if calibrate:
        value, rule = f"{source.architecture} hears speech, and no recordings were given", "a fixed scale needs data"
        remedy = "--calibration FOLDER of WAV files, or a recipe with scales by token: int8-dynamic"
        raise InputError(CODE, "calibration.set", value, rule, remedy)
    return False


def extractor_of(source: Source) -> Any:
    """Load the model's feature extractor. Raises InputError `calibration-audio`."""
    return extractor_in(source.path, source.ref, trust=source.trust_remote_code)


def extractor_in(folder: Path, ref: str, *, trust: bool | None = None) -> Any:
    """Load the feature extractor of a folder; `ref` names it in errors. Raises InputError `calibration-audio`."""
    if not any((folder / name).is_file() for name in _EXTRACTORS):
        rule = f"recordings go through the model's feature extractor: {' or '.join(_EXTRACTORS)}"
        raise InputError(CODE, ref, "no such file in the folder", rule, "copy the original's file into it")
    try:
        return pretrained.extractor(folder, trust=trust)
    except InputError:
        raise
    except Exception as problem:  # it may want another library, or be damaged
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise InputError(CODE, ref, reason, "transformers loads the model's feature extractor") from None


def read_with(extractor: Any, reference: str) -> list[Recording]:
    """Read recordings at the rate of a feature extractor, in parts that it takes. Raises as `recordings`."""
    return recordings(reference, rate_of(extractor), window_of(extractor))


def window_of(extractor: Any) -> int | None:
    """Return the longest recording of a model, in samples; None for any length."""
    return getattr(extractor, "n_samples", None)


def rate_of(extractor: Any) -> int:
    """Return the samples a second that a feature extractor takes."""
    return int(getattr(extractor, "sampling_rate", None) or _RATE)


def features(extractor: Any, parts: Sequence[Recording], takes: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Return the encoder's inputs for each recording: arguments of the model's forward, [1, ...], of one shape.

    Args:
        takes: names of the arguments of that forward.
    """
    how = {"sampling_rate": rate_of(extractor), "return_tensors": "pt"}
    heard: list[dict[str, torch.Tensor]] = [dict(extractor(part.samples, **how)) for part in parts]
    if len({value.shape for one in heard for value in one.values()}) > len(heard[0]):
        whole = extractor([part.samples for part in parts], padding=True, **how)
        heard = [{key: value[at : at + 1] for key, value in whole.items()} for at in range(len(parts))]
    return [{key: value for key, value in one.items() if key in takes} for one in heard]


def load_heard(reference: str, part: Part, source: Source, *, samples: int | None, tokens: int) -> TokenSet:
    """Load a set of recordings.

    Args:
        part: half of the set that calibrates, the half that scores, or all of it.
        samples: most recordings; None for all.
        tokens: most ids of a transcript.

    Raises InputError: `calibration-audio`; those of `recordings`.
    """
    import inspect

    from quantkit.calibrate.tokens.ids import CONFIRMED, TokenSet
    from quantkit.model.streaming.calls import Pictures, Sounds

    extractor, tokenizer = extractor_of(source), source.tokenizer()
    whole = read_with(extractor, reference)
    parts = whole if part == "all" else whole[part == "eval" :: 2]
    parts = parts[:samples]
    if not parts:
        value = f"{len(whole)} recording{'s' * (len(whole) != 1)}, none of them left to score"
        raise InputError(CODE, reference, value, "every second one calibrates, the others score", "more recordings")
    heard = features(extractor, parts, list(inspect.signature(source.model_class().forward).parameters))
    texts = [recording.text for recording in parts]
    written = _written(source, tokenizer, [one for one, text in zip(heard, texts, strict=True) if text is None])
    spoken = [written.pop(0) if text is None else text for text in texts]
    rows = [_ids(tokenizer, source.path, text)[: min(tokens, LONGEST)] for text in spoken]
    lengths = tuple(len(row) for row in rows)
    longest = max(lengths)
    ids = torch.tensor([(row * longest)[:longest] for row in rows])
    digest = hashlib.sha256()
    for row, one in zip(ids, heard, strict=True):
        digest.update(np.ascontiguousarray(row.numpy(), dtype="<i8").tobytes())
        for name in sorted(one):
            tensor = one[name]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    notes = [f"{len(parts)} of {len(whole)} recordings, {'all' if part == 'all' else 'every second one'}"]
    if (without := texts.count(None)) > 0:
        notes.append(f"{without} of them have no transcript: the original model's own stands in")
    rows_heard = {Pictures.key(row): one for row, one in zip(ids, heard, strict=True)}
    loaded = TokenSet(
        ids,
        content.find("calibration", reference).resolve().name,
        "calib" if part == "calib" else "eval",
        digest.hexdigest(),
        tuple(notes),
        pictures=Sounds(rows_heard),
        lengths=lengths,
        spoken=tuple(texts),
    )
    # a beginning may be that of several: scores are confirmed on the right recording
    rows_heard.update(zip(map(Pictures.key, loaded.beginnings(*CONFIRMED)), heard, strict=False))
    return loaded


def _written(source: Source, tokenizer: Any, heard: Sequence[dict[str, torch.Tensor]]) -> list[str]:
    """Return the original model's transcripts of some recordings."""
    from quantkit.model.source.places import quiet_loading

    if not heard:
        return []
    with quiet_loading():
        model = source.load()
    return transcripts(model, tokenizer, heard)


def transcripts(model: Any, tokenizer: Any, heard: Sequence[Mapping[str, torch.Tensor]], most: int = 0) -> list[str]:
    """Return a model's transcripts of recordings, greedily, by its own generation config.

    Args:
        most: most tokens of a transcript; 0 for as many as the model takes.
    """
    limit = {"max_new_tokens": most} if most else {}
    with torch.inference_mode():
        written = [model.generate(**one, do_sample=False, num_beams=1, **limit)[0] for one in heard]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in written]


def prompt_of(tokenizer: Any, path: Path) -> list[int]:
    """Return the ids before a transcript: the token that begins it, and the settings of the task."""
    stated = generation_of(path)
    if stated.get("is_multilingual") and hasattr(tokenizer, "set_prefix_tokens"):
        language = stated.get("language") or tokenizer.language or "english"
        tokenizer.set_prefix_tokens(language=language, task=tokenizer.task or "transcribe")
    empty = [int(token) for token in tokenizer("").input_ids]
    before = empty[:-1] if empty and empty[-1] == tokenizer.eos_token_id else empty
    start = _start(path, stated)
    return before if before[:1] == [start] else [start, *before]


def generation_of(path: Path) -> dict[str, Any]:
    """Read a folder's generation_config.json; empty without one."""
    place = path / "generation_config.json"
    return strict_json(limits.read(place), str(place), "config-invalid", "config-invalid") if place.is_file() else {}


def _start(path: Path, stated: Mapping[str, Any]) -> int:
    from quantkit.model.streaming.calls import first_token

    config = pretrained.config(path)
    return first_token(SimpleNamespace(config=config, generation_config=SimpleNamespace(**stated)))


def _ids(tokenizer: Any, path: Path, text: str) -> list[int]:
    """Return the ids of a transcript as the model writes it, from the token that begins it to the one that ends it."""
    before = prompt_of(tokenizer, path)
    # texts of a byte-level tokenizer begin with a space, as words inside of them do
    spaced = f" {text.lstrip()}" if hasattr(tokenizer, "set_prefix_tokens") else text
    return [*before, *(int(token) for token in tokenizer(spaced, add_special_tokens=False).input_ids), _end(tokenizer)]


def _end(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id)
