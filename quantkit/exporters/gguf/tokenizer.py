"""Write a tokenizer for llama.cpp: tokens with their kinds, merges or scores, special tokens, chat template.

    gpt2     byte-level BPE. Its pre-tokenizer is a name (`smollm`, `qwen2`), identified by the expressions in
             tokenizer.json; llama.cpp's converter uses a hash of one text's ids, which another
             vocabulary changes.
    llama    BPE over text whose spaces are ▁, spelled in bytes where nothing fits. llama.cpp merges the two neighbours
             whose union has the highest score: that of `tokenizer.model`, or, without one, minus the rank of
             the first merge that makes the token. A token beyond the embedding table (Gemma 3's
             `<image_soft_token>`) is left out, as its converter does: no model takes it.

Special tokens, whether a text begins with one, and the template come from the `gguf` package's reading of the same
files (`SpecialVocab`). A tokenizer that llama.cpp cannot express is refused: another kind of model, or other
expressions. Sources: conversion/base.py (`get_vocab_base`, `_create_vocab_sentencepiece`), llama-vocab.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.errors import InputError, reading
from quantkit.model.source.gguf.tokenizer import DIGITS, GPT2, PRE

if TYPE_CHECKING:
    import gguf

    from quantkit.model.source.open import Source

_SPACE = "▁"


def add_tokenizer(writer: gguf.GGUFWriter, source: Source, rows: int) -> None:
    """Write everything of a source's tokenizer.

    Args:
        rows: rows of the embedding table; tokens are padded to this number.

    Raises InputError: `gguf-tokenizer`, `tokenizer-missing`, `tokenizer-damaged`.
    """
    import gguf

    with _reading(source):
        stated = _stated(source)
        kind, pre = kind_of(stated, source.ref)
        prefix = _json(source.path / "tokenizer_config.json").get("add_prefix_space")
        scores = None
        if kind == "llama":
            tokens, scores, types = _scored(source, stated, rows)
        else:
            if source.architecture in ("LlamaForCausalLM", "MistralForCausalLM") and prefix is not None:
                writer.add_add_space_prefix(bool(prefix))
            tokens, types = _listed(source, stated, rows)
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        if scores is not None:
            writer.add_token_scores(scores)
        writer.add_token_types(types)
        if scores is not None:
            writer.add_add_space_prefix(_prepends(stated))
        count = len(tokens) if kind == "llama" else None
        special = gguf.SpecialVocab(source.path, load_merges=kind == "gpt2", n_vocab=count)
        special.add_to_gguf(writer, quiet=True)
        if source.architecture == "LlamaForCausalLM" and rows == 49152:
            writer.add_add_bos_token(False)  # as the converter does for code models with this vocabulary


def demand_held(source: Source) -> None:
    """Refuse, before any work, a tokenizer that llama.cpp cannot express. Raises as `add_tokenizer`."""
    with _reading(source):
        stated = _stated(source)
        kind, _ = kind_of(stated, source.ref)
        if (rows := source.config.get("vocab_size")) is None:
            return
        if kind == "llama":
            tokenizer = source.tokenizer() if _beyond(stated, rows) else None
            ends = (tokenizer.bos_token_id, tokenizer.eos_token_id) if tokenizer is not None else ()
            _demand_rows(source, max((end for end in ends if end is not None), default=0), rows)
        else:
            _demand_rows(source, max(_ids(stated).values(), default=0), rows)


def _reading(source: Source) -> AbstractContextManager[None]:
    def damaged(problem: str) -> InputError:
        return InputError("tokenizer-damaged", where=source.ref, value=problem, rule="a tokenizer.json of tokenizers")

    return reading(damaged)


def left_out(source: Source, rows: int) -> list[str]:
    """List the tokens without a row in the embedding table; the file omits them.

    Raises InputError: `tokenizer-missing`, `tokenizer-damaged`.
    """
    return _beyond(_stated(source), rows)


def _beyond(stated: Mapping[str, Any], rows: int) -> list[str]:
    return [token for token, number in _ids(stated).items() if number >= rows]


def _ids(stated: Mapping[str, Any]) -> dict[str, int]:
    """Map every token to its id, added tokens included."""
    return {**stated["model"]["vocab"], **{str(token["content"]): int(token["id"]) for token in _added(stated)}}


def _added(stated: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return stated.get("added_tokens") or ()


def spaced(source: Source) -> bool:
    """Tell whether llama.cpp adds a space before texts where the tokenizer adds none.

    It does so before any text, and after every special token, like SentencePiece's `Prepend`. Metaspace skips a text
    that begins with a space and, with `first`, text after a special token.
    """
    splits = _flat(_stated(source).get("pre_tokenizer"), "pretokenizers")
    return any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in splits)


def kind_of(stated: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Name llama.cpp's kind of vocabulary for a tokenizer.json, and its pre-tokenizer.

    Raises InputError: `gguf-tokenizer`.
    """
    model = stated["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refused(where, f"a tokenizer of type {model['type']}", "byte-level BPE or SentencePiece's BPE")
    if not model.get("merges"):
        raise _refused(where, "a BPE of no merges", "llama.cpp loads one with merges")
    parts = _flat(stated.get("pre_tokenizer"), "pretokenizers")
    splits = [split for part in parts for split in _split(part, where)]
    normal = _flat(stated.get("normalizer"), "normalizers")
    if model.get("byte_fallback") and GPT2 not in splits:
        odd = [part for part in normal if part["type"] not in ("Replace", "Prepend")]
        if odd or any(split != _SPACE for split in splits):
            raise _refused(where, f"{(odd or splits)[0]!r:.80}", "SentencePiece's BPE, whose spaces are ▁")
        return "llama", "default"
    odd = [part for part in normal if part["type"] != "NFC"]  # llama.cpp skips NFC
    if odd:
        raise _refused(where, f"normalizer {odd[0]['type']}", "none, or NFC")
    expressions = tuple(split for split in splits if split != "")
    name = PRE.get((expressions, bool(model.get("ignore_merges"))))
    if name is None:
        known = ", ".join(PRE.values())
        raise _refused(where, f"pre-tokenizer {' then '.join(expressions)!r:.120}", f"one that llama.cpp calls {known}")
    return "gpt2", name


def _flat(part: Any, inside: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [leaf for inner in part[inside] for leaf in _flat(inner, inside)] if part["type"] == "Sequence" else [part]


def _split(part: Mapping[str, Any], where: str) -> list[str]:
    """List the expressions of a pre-tokenizer for splitting a text; "" for one that splits nothing."""
    kind = part["type"]
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return [GPT2 if part.get("use_regex", True) else ""]
    if kind == "Digits" and part.get("individual_digits"):
        return [DIGITS]
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        pattern = part["pattern"]
        return [DIGITS if pattern.get("Regex") == r"\p{N}" else str(pattern.get("Regex", pattern))]
    if kind == "Split" and part["pattern"].get("String") == " ":  # Gemma's: no space is left to split by
        return []
    if kind == "Metaspace" and part.get("replacement", _SPACE) == _SPACE and not part.get("split", True):
        return [_SPACE]
    raise _refused(where, f"pre-tokenizer {kind}", "byte-level BPE or SentencePiece's BPE")


def _refused(where: str, value: str, rule: str) -> InputError:
    return InputError("gguf-tokenizer", where=where, value=value, rule=rule, remedy="remove `gguf` from `export`")


def _prepends(stated: Mapping[str, Any]) -> bool:
    """Tell whether a space is added before a text."""
    splits = _flat(stated.get("pre_tokenizer"), "pretokenizers")
    ahead = any(part.get("prepend_scheme", "never") != "never" for part in splits)
    return ahead or any(part["type"] == "Prepend" for part in _flat(stated.get("normalizer"), "normalizers"))


def _stated(source: Source) -> dict[str, Any]:
    """Read tokenizer.json; without one, convert the folder's files by transformers."""
    path = source.path / "tokenizer.json"
    if path.is_file():
        return _json(path)
    tokenizer = source.tokenizer()
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise _refused(source.ref, type(tokenizer).__name__, "a tokenizer.json")
    return json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[no-any-return]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(limits.read(path, limits.DATA)) if path.is_file() else {}


def _looks_special(token: str) -> bool:
    """Tell whether llama.cpp's converter treats an unmarked token as special."""
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>")))
        or (token.startswith("<unused") and token.endswith(">"))
    )


def _listed(source: Source, stated: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """List tokens and kinds of a byte-level BPE."""
    from gguf import TokenType
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(stated))
    words = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    _demand_rows(source, max(words, default=0), rows)
    tokens, types = [], []
    for number in range(rows):
        token = words.get(number, f"[PAD{number}]")
        kind = TokenType.NORMAL if number in words else TokenType.UNUSED
        if number in added:
            if not added[number].normalized:
                ids = tokenizer.encode(token, add_special_tokens=False).ids
                token = tokenizer.decode(ids, skip_special_tokens=False)
            special = added[number].special or _looks_special(token)
            kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
            token = token if special else token.replace(_SPACE, " ")
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _demand_rows(source: Source, last: int, rows: int) -> None:
    if last >= rows:
        rule = f"the table of embeddings has {rows} rows"
        raise _refused(source.ref, f"a token has the id {last}", rule)


def _scored(source: Source, stated: Mapping[str, Any], rows: int) -> tuple[list[str], list[float], list[int]]:
    """List tokens, scores and kinds of SentencePiece's BPE."""
    from gguf import TokenType

    model = stated["model"]
    ids = {token: number for token, number in model["vocab"].items() if number < rows}
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    scores = [-10000.0] * rows
    ranks = _ranks(model["merges"])
    for token, number in ids.items():
        spelled = re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) is not None
        kind = TokenType.BYTE if spelled else TokenType.NORMAL
        tokens[number], types[number] = token, int(TokenType.UNKNOWN if token == model.get("unk_token") else kind)
        scores[number] = -float(ranks.get(token, len(ranks)))
    known = _pieces(source.path / "tokenizer.model")
    for number, (token, score, kind) in enumerate(known[:rows]):
        tokens[number], scores[number], types[number] = token, score, kind
    for added in _added(stated):
        number, token = int(added["id"]), str(added["content"])
        if number >= rows or token == model.get("unk_token"):
            continue
        special = added.get("special") or _looks_special(token)
        tokens[number] = token if special else token.replace(_SPACE, " ")
        types[number] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        scores[number] = -1000.0
    return tokens, scores, types


def _ranks(merges: Sequence[Any]) -> dict[str, int]:
    """Map every token to the rank of the first merge that makes it, counting tokens."""
    ranks: dict[str, int] = {}
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, len(ranks))
    return ranks


def _pieces(path: Path) -> list[tuple[str, float, int]]:
    """List (token, score, kind) from SentencePiece's `tokenizer.model`; empty if there is no such file."""
    if not path.is_file():
        return []
    from transformers.utils import sentencepiece_model_pb2_new as schema

    model = schema.ModelProto()
    model.ParseFromString(limits.read(path, limits.DATA))
    # SentencePiece and llama.cpp number kinds equally
    return [(piece.piece, piece.score, piece.type) for piece in model.pieces]
