"""What kind of model: a decoder, an encoder or a network; one word for each, in every document and message.

    decoder   goes on with tokens: it has a language-model head
    encoder   takes tokens and gives what it makes of them: a model of transformers, or an ONNX graph of token ids
    network   anything else, images most of all: an ONNX graph, or a class of transformers that takes images alone

What was written before is read too: `vision` was a word for networks, and for every graph. It is translated here and
nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

Kind = Literal["decoder", "encoder", "network"]
_BEFORE = {"vision": "network"}


def today(word: Any) -> Any:
    """A kind as it is called now; what is no kind comes back as it is, for whoever validates it."""
    return _BEFORE.get(word, word) if isinstance(word, str) else word


# of a document: what it says may be a word of before
Said = Annotated[Kind, BeforeValidator(today)]
