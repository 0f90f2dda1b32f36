"""Conversion of the tokenizer in a GGUF file's metadata to `tokenizer.json`.

GGUF stores the vocabulary, and only names for the rest:

    gpt2     byte-level BPE with its merges. `pre` names the split of a text before merging; a leading space is never
             added, whatever a file says
    llama    SentencePiece's BPE: a space is ▁, characters without a token become bytes, and the two neighbours whose
             union has the highest score are merged first. So the merges are all splits of a token into two tokens, by
             falling score: {▁t: 0, in: -1, ing: -2, ...} -> i n, in g, i ng. `add_space_prefix` puts a space before a
             text, and behind a special token

Tokens of type *control* are special. *User-defined* ones are text that is always one token (`<table>`, two spaces),
matched before any merge. *Unused* ones pad the embedding and are no tokens.
Sources: llama-vocab.cpp of llama.cpp; `Qwen2Tokenizer` and `GemmaTokenizer` of transformers.

Splits of byte-level tokenizers before merging, by llama.cpp's names:

    smollm    digits one by one, then GPT-2's expression: "in 2024" -> "in", " ", "2", "0", "2", "4"
    qwen2     an expression of its own, with single digits
    llama-bpe the same with up to three digits, and a word that is a token stays whole whatever the merges say

`exporters/gguf/tokenizer.py` maps a tokenizer.json to these names; this module maps the names to a tokenizer. Source:
llama-vocab.cpp of llama.cpp, which has each expression beside its own spelling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType
_SPACE = "▁"
# Phi-3's special tokens, except these, absorb whitespace behind them; llama.cpp decides by the file's name
_STRIPPING, _NOT_STRIPPING = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_json(meta: dict[str, Any], where: str) -> str:
    """Return tokenizer.json of a GGUF file. Raises `gguf-tokenizer` for an unknown kind or pre-tokenizer."""
    from tokenizers import AddedToken, processors

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    kind, pre = meta.get("tokenizer.ggml.model"), _pre(meta)
    if kind == "llama":  # llama.cpp has spaces where SentencePiece has its own sign for them
        tokens = [token.replace(" ", _SPACE) for token in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(meta, vocabulary, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta, vocabulary)
    else:
        raise _unknown(where, f"model {kind}", "gpt2 or llama")
    strips = any(name in str(meta.get("general.name", "")).lower() for name in _STRIPPING)
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=role == _CONTROL,
                normalized=_SPACE in token,  # a space becomes its sign first
                rstrip=strips and role == _CONTROL and token not in _NOT_STRIPPING,
            )
            for token, role in zip(tokens, types, strict=True)
            if role in (_CONTROL, _USER_DEFINED)
        ]
    )
    if meta.get("tokenizer.ggml.add_eos_token", False):
        raise _unknown(where, "add_eos_token", "a prompt has no token at its end")
    if meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in BEGINS):
        number = meta.get("tokenizer.ggml.bos_token_id", 1 if kind == "llama" else None)
        if number is None:
            raise _unknown(where, "add_bos_token", "a file says which token a text begins with")
        bos = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return str(tokenizer.to_str())


def demand_whole(meta: dict[str, Any], where: str) -> None:
    """Compare lists with the vocabulary. Raises `gguf-damaged`; `gguf-tokenizer` without a vocabulary."""
    if "tokenizer.ggml.tokens" not in meta:
        raise _unknown(where, "no tokens", "a model comes with its vocabulary")
    tokens = meta["tokenizer.ggml.tokens"]
    for key, value in meta.items():
        if not key.startswith("tokenizer.ggml."):
            continue
        length = len(value) if key.endswith(("token_type", "scores")) else len(tokens)
        last = int(value) if key.endswith("_token_id") else 0
        if length != len(tokens) or not 0 <= last < len(tokens):
            odd = f"{key} of {length}" if length != len(tokens) else f"{key} = {last}"
            raise InputError("gguf-damaged", where, odd, f"its vocabulary has {len(tokens)} tokens")
    for merge in meta.get("tokenizer.ggml.merges", ()):
        if " " not in merge:
            raise InputError("gguf-damaged", where, f"the merge {merge!r:.60}", "two tokens and a space between them")


def _pre(meta: dict[str, Any]) -> str | None:
    """Return a file's pre-tokenizer under its main name."""
    name = meta.get("tokenizer.ggml.pre")
    return SAME.get(str(name), name)


def tokenizer_config(meta: dict[str, Any], length: int) -> dict[str, Any]:
    """Return tokenizer_config.json: names of special tokens and the chat template; `length` is the most tokens."""
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json says, no model's class on top
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": _prefixed(meta),
    }
    for key, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token := meta.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[key] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def _prefixed(meta: dict[str, Any]) -> bool:
    return meta.get("tokenizer.ggml.model") == "llama" and bool(meta.get("tokenizer.ggml.add_space_prefix", True))


def _byte_level(meta: dict[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    stated = meta.get("tokenizer.ggml.pre")
    splits, whole = {name: how for how, name in PRE.items()}.get(str(_pre(meta)), ((), False))
    if not splits:
        raise _unknown(where, f"model gpt2, pre {stated}", f"gpt2 with one of {', '.join([*PRE.values(), *SAME])}")
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts: list[Any] = [
        digits if split == DIGITS else pre_tokenizers.Split(Regex(split), behavior="isolated")
        for split in splits
        if split != GPT2
    ]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in splits))
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    if stated in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = meta["tokenizer.ggml.tokens"][meta.get("tokenizer.ggml.unknown_token_id", 0)]
    bpe = models.BPE(vocab=vocabulary, merges=_merges(meta), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _prefixed(meta):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces) if len(spaces) > 1 else spaces[0]
    tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def _merges(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """List all pairs of tokens whose union is a token, by falling score of the union."""
    tokens, scores, types = (meta[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    best_first = sorted(range(len(tokens)), key=lambda i: -scores[i])
    return [
        (tokens[i][:at], tokens[i][at:])
        for i in best_first
        if tokens[i] in normal
        for at in range(1, len(tokens[i]))
        if tokens[i][:at] in normal and tokens[i][at:] in normal
    ]


def _unknown(where: str, value: str, rule: str) -> InputError:
    return InputError("gguf-tokenizer", where, value, rule)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + "{after}"
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + "{after}"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = "bytes, by GPT-2's expression"
DIGITS = "digits one by one"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_TEKKEN = rf"{_CASED.replace('{after}', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED.replace('{after}', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
# (expressions that split a text, in order; True if words that are tokens stay whole) -> llama.cpp's name
PRE = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
}
# other names of llama.cpp for the same splits
SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "lfm2": "llama-bpe", "falcon3": "llama-bpe"}
SAME |= {"starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "phi-2": "gpt-2", "olmo": "gpt-2"}
SAME |= {"stablelm2": "qwen2", "dbrx": "smaug-bpe", "llama4": "gpt-4o"}
# pre-tokenizers with a begin token by default
BEGINS = ("llama-bpe", "tekken")
# pre-tokenizers with Unicode's NFC first, which llama.cpp omits
COMPOSED = ("qwen2",)
