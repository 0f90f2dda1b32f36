"""A checkpoint as plain transformers loads it: its class, its config cut to the first blocks, and a batch to run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.model.source import code, pretrained
from quantkit.model.source.open import model_class_of
from quantkit.model.source.weights import strict_json
from quantkit.model.structure.names import same
from quantkit.model.structure.sizes import cut_config, positions

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


def loading_dtype(config: Mapping[str, Any], stored: str) -> torch.dtype:
    """The dtype that transformers loads in by default: what the config says, else what the weights are stored in."""
    import torch

    name = str(config.get("dtype") or config.get("torch_dtype") or stored).removeprefix("torch.")
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else getattr(torch, stored)  # type: ignore[no-any-return]


def block_of(name: str) -> int:
    """The number of the block that a tensor belongs to; -1 outside of blocks."""
    found = _NUMBER.search(name)
    return int(found.group(1)) if found else -1


def config_json(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises InputError `config-invalid`."""
    return strict_json(limits.read(folder / "config.json"), "config.json", "config-invalid")


def model_class(folder: Path) -> Any:
    """The checkpoint's class: transformers' own, or one in trusted code. Raises InputError `remote-code`."""
    return model_class_of(config_json(folder), folder, str(folder), code.is_trusted(folder))


def config_of(folder: Path, blocks: int | None, *, dense: bool = False) -> Any:
    """The config, cut to the first blocks; `dense` without the quantization."""
    config = pretrained.config(folder)
    if dense and hasattr(config, "quantization_config"):
        del config.quantization_config
    if blocks is not None:
        cut_config(config, blocks)
        _cut_targets(getattr(config, "quantization_config", None), blocks)
    return config


def _cut_targets(quantization: Any, blocks: int) -> None:
    """Leave out what config groups name of later blocks: the library warns of each linear that it does not find."""
    if not isinstance(quantization, dict) or not isinstance(quantization.get("config_groups"), dict):
        return
    groups = quantization["config_groups"]
    for name, group in list(groups.items()):
        group["targets"] = [target for target in group["targets"] if block_of(target) < blocks]
        if not group["targets"]:
            del groups[name]


def loaded(model_class: Any, folder: Path, blocks: int | None, leftover: Collection[str]) -> tuple[Any, str]:
    """The model as plain transformers loads it, and what is wrong with its keys."""
    options = {"config": config_of(folder, blocks), "dtype": "auto", "output_loading_info": True}
    model, info = pretrained.network(model_class, folder, **options)
    unexpected = {
        name
        for name in info["unexpected_keys"]
        if (blocks is None or block_of(name) < blocks)
        and not any(name.endswith(other) if other.startswith(".") else same(name, other) for other in leftover)
    }
    for kind, names in (
        ("missing", info["missing_keys"]),
        ("unexpected", unexpected),
        ("mismatched", info["mismatched_keys"]),
    ):
        if names:
            return model, f"{len(names)} {kind} keys, first {sorted(str(name) for name in names)[0]}"
    return model, ""


def batch(config: Any) -> dict[str, torch.Tensor]:
    """Two sequences of 24 tokens, always the same."""
    import torch

    inner = config.get_text_config()
    length = min(24, positions(config.to_dict()) or 24)
    ids = torch.arange(2 * length).mul(7919).remainder(inner.vocab_size).reshape(2, length)
    return {"input_ids": ids}


def logits(model: Any, inputs: Mapping[str, torch.Tensor], *, cached: bool) -> torch.Tensor:
    """Logits; without a cache, unless it is one that quantizes: not every class can fill one that was cut to a few
    layers."""
    import torch

    from quantkit.model.streaming.calls import uncached

    with torch.no_grad(), nullcontext() if cached else uncached(model):
        found: torch.Tensor = model.eval()(**inputs)[0]
    return found.float()
