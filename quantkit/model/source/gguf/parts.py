"""What a GGUF file becomes, whoever read it, and how one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Read:
    """A model out of a file.

    Args:
        config: config.json.
        shapes: parameter -> its shape.
        tensors: parameter -> the file's tensor.
        values: tensor of the file and its dequantized values -> the parameter's.
    """

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, str]
    values: Callable[[str, NDArray[np.float32]], torch.Tensor]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor of the package's reader, which counts the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def short(value: float) -> float:
    """A float32's shortest decimal: GGUF's 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def special_tokens(meta: Mapping[str, Any]) -> dict[str, int | None]:
    """config.json's key of each -> its number, None where a file says none."""
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: meta.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in named.items()}


def refused(where: str, value: str, rule: str) -> InputError:
    """A sound file of a model that is not converted exactly: `gguf-architecture`."""
    remedy = "open what it was made from: a Hugging Face folder (./folder), or hf:org/name"
    return InputError("gguf-architecture", where=where, value=value, rule=rule, remedy=remedy)


def damaged(where: str, value: str, rule: str = "") -> InputError:
    """A file that contradicts itself: `gguf-damaged`."""
    return InputError("gguf-damaged", where=where, value=value, rule=rule, remedy="fetch or install it again")
