"""The tokenizer in a GGUF file's metadata, as `tokenizer.json`.

GGUF holds the vocabulary; the rest it knows by a name only:

    gpt2     byte-level BPE with its merges. `pre` names the pre-tokenizer: `gpt-2` its regular expression; `smollm`
             first splits into single digits; `qwen2` has an expression of its own, after Unicode's NFC (which
             llama.cpp leaves out and Qwen's tokenizer does)
    llama    SentencePiece's BPE: a space is ▁, what is no token is spelled in bytes, and the two neighbours whose union
             has the highest score are merged first. So the merges are all the ways to put a token together from two
             others, by falling score: {▁t: 0, in: -1, ing: -2, ...} -> i n, in g, i ng

Tokens of type *control* are special. *User-defined* ones are text that is one token wherever it stands (`<table>`, two
spaces), found before any merge. *Unused* ones fill the embedding up and are no tokens.

Sources: llama-vocab.cpp of llama.cpp; `Qwen2Tokenizer` and `GemmaTokenizer` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType
_SPACE = "▁"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_json(meta: dict[str, Any], where: str) -> str:
    """tokenizer.json of a GGUF file.

    Raises:
        InputError: `gguf-tokenizer`: another kind, or a pre-tokenizer that is known by no name here.
    """
    from tokenizers import AddedToken, processors

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    kind = meta.get("tokenizer.ggml.model")
    if kind == "llama":  # llama.cpp has spaces where SentencePiece has its own sign for them
        tokens = [token.replace(" ", _SPACE) for token in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(meta, vocabulary, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(meta, vocabulary, where)
    else:
        raise _unknown(where, f"model {kind}", "gpt2 or llama")
    tokenizer.add_tokens(
        [
            AddedToken(token, special=role == _CONTROL, normalized=_SPACE in token)  # a space becomes its sign first
            for token, role in zip(tokens, types, strict=True)
            if role in (_CONTROL, _USER_DEFINED)
        ]
    )
    if meta.get("tokenizer.ggml.add_eos_token", False):
        raise _unknown(where, "add_eos_token", "a prompt has no token at its end")
    if meta.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos = tokens[(number := meta["tokenizer.ggml.bos_token_id"])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
        )
    return str(tokenizer.to_str())


def tokenizer_config(meta: dict[str, Any], length: int) -> dict[str, Any]:
    """tokenizer_config.json: the names of special tokens and the chat template; `length`: the most tokens."""
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json says, no model's class on top
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
    }
    for key, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token := meta.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[key] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def _byte_level(meta: dict[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", False))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    splits: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "gpt-2": [gpt2],
        "qwen2": [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ],
    }
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in splits:
        raise _unknown(where, f"model gpt2, pre {pre}", f"gpt2 with one of {', '.join(splits)}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(meta: dict[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if meta.get("tokenizer.ggml.add_space_prefix", True):
        raise _unknown(where, "model llama, add_space_prefix", "llama without a space before the text")
    unknown = meta["tokenizer.ggml.tokens"][meta["tokenizer.ggml.unknown_token_id"]]
    bpe = models.BPE(vocab=vocabulary, merges=_merges(meta), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, by the union's falling score."""
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
    return InputError("gguf-tokenizer", where=where, value=value, rule=rule)
