"""transformers' class for a checkpoint, and a model of that class from tensors that are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import MissingDependency
from quantkit.model.source import pretrained
from quantkit.model.source.open import model_class_of

if TYPE_CHECKING:
    import torch


def described(folder: Path) -> tuple[Any, Any]:
    """(model class, config) of a checkpoint. Raises MissingDependency: transformers."""
    try:
        import transformers
    except ImportError:
        raise MissingDependency("transformers", extra="compile", purpose="loading a bundle in torch") from None
    config = pretrained.config(folder)
    name = (config.architectures or [""])[0]
    if pretrained.is_trusted(folder):
        return model_class_of(config.to_dict(), folder, folder.name, True), config
    return getattr(transformers, name, transformers.AutoModel), config


def built(model_class: Any, config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The model of dense tensors, eval mode, whatever its checkpoint says of quantization; `config` loses that."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return pretrained.network(model_class, None, config=config, state_dict=dict(state), dtype=dtype).eval()
