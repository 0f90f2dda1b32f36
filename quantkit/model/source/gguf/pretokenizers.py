"""What byte-level tokenizers split a text by before they merge, and what llama.cpp calls it.

    smollm    digits one by one, then GPT-2's expression: "in 2024" -> "in", " ", "2", "0", "2", "4"
    qwen2     an expression of its own, with one digit a piece
    llama-bpe the same with up to three, and a word that is a token stays whole whatever the merges say

Read from a tokenizer.json these give the name (`exporters/gguf/tokenizer.py`), read from a name they give the
tokenizer (`tokenizer.py`). Source: llama-vocab.cpp of llama.cpp, which has each expression beside its own spelling.
"""

from __future__ import annotations

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
# (what a text is split by, in order; whether words that are tokens stay whole) -> llama.cpp's name
PRE = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
}
# other names that llama.cpp has for the same
SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "lfm2": "llama-bpe", "falcon3": "llama-bpe"}
SAME |= {"starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "phi-2": "gpt-2", "olmo": "gpt-2"}
SAME |= {"stablelm2": "qwen2", "dbrx": "smaug-bpe", "llama4": "gpt-4o"}
# where a file does not say it, these begin a text with a token of their own
BEGINS = ("llama-bpe", "tekken")
# Unicode's NFC goes before, of which llama.cpp knows nothing
COMPOSED = ("qwen2",)
