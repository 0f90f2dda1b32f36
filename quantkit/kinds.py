"""Kinds of model: decoder, encoder and network; every document and message uses these three words.

    decoder   generates tokens: it has a language-model head
    encoder   reads tokens and returns features or classes: a transformers model, or an ONNX graph of token ids
    network   anything else, images most of all: an ONNX graph, or a transformers class that reads images only

Older documents say `vision` for networks and for every graph. That word is translated here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

Kind = Literal["decoder", "encoder", "network"]
_BEFORE = {"vision": "network"}


def today(word: Any) -> Any:
    """Translate an older word for a kind; any other value is returned as it is, for validation to judge."""
    return _BEFORE.get(word, word) if isinstance(word, str) else word


# a kind in a document, which may use an older word
Said = Annotated[Kind, BeforeValidator(today)]
