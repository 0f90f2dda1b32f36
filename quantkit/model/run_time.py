"""What a checkpoint says of the moment it runs: how inputs of linears, and keys and values, are quantized there.

compressed-tensors' `quantization_config` has an `input_activations` in each config group and a `kv_cache_scheme`; the
fixed scales lie beside the weights, as `LINEAR.input_scale` and `ATTENTION.k_scale`, `ATTENTION.v_scale`. Written and
read here, whatever layout the weights have; `transforms` puts the same into a model that is streamed.

    cache     tensor [1]   head [H, 1, 1]       others have no words there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.model.layouts import unsupported
from quantkit.model.source.weights import strict_json
from quantkit.model.structure.names import same
from quantkit.scheme import ActivationScheme, CacheScheme

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quantkit.formats.base.activation import InputScale
    from quantkit.model.finished import Finished
    from quantkit.model.streaming.transforms import Transform

INPUT_SCALE, INPUT_ZERO = ".input_scale", ".input_zero_point"
KEY_SCALE, VALUE_SCALE = ".k_scale", ".v_scale"
PARTS = (INPUT_SCALE, INPUT_ZERO, KEY_SCALE, VALUE_SCALE)
_KINDS = {"int8": "int", "fp8_e4m3": "float"}
_DENSE = "dense"
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_STRATEGIES = {"tensor": "tensor", "token": "token", "group": "group", "head": "attn_head"}


@dataclass(frozen=True)
class RunTime:
    """How a model's inputs and cache are quantized when it runs: linears by their full names, blocks by number."""

    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    scales: Mapping[str, InputScale] = field(default_factory=dict)
    cache: CacheScheme | None = None
    cache_scales: Mapping[int, tuple[InputScale, InputScale]] = field(default_factory=dict)

    def transforms(self, block_names: Sequence[str], dtype: torch.dtype) -> list[Transform]:
        """Put it into the blocks of a model whose stored dtype is `dtype`."""
        from quantkit.model.streaming.transforms import QuantizedCaches, QuantizedInputs

        transforms: list[Transform] = []
        if self.activations:
            transforms.append(QuantizedInputs(list(block_names), self.activations, self.scales, dtype))
        if self.cache is not None:
            transforms.append(QuantizedCaches(self.cache, self.cache_scales, dtype))
        return transforms


def of_results(finished: Finished, blocks: Sequence[str] = ()) -> RunTime:
    """Take what the passes decided; of the cache, for the blocks that are named."""
    scales = {name: finished.input_scale(name) for name in finished.activations}
    cache = {index: finished.cache_scales(name) for index, name in enumerate(blocks)}
    return RunTime(
        finished.activations,
        {name: scale for name, scale in scales.items() if scale is not None},
        finished.cache,
        {index: pair for index, pair in cache.items() if pair is not None},
    )


def refuse(
    activations: Mapping[str, ActivationScheme], cache: CacheScheme | None, layout: str, symmetric: bool
) -> None:
    """Refuse what a checkpoint whose weights have a layout cannot say. Raises InputError (`layout-unsupported`)."""
    packed = layout.endswith("quantized")
    zeros = "transformers expands packed weights with zero points as it loads them, and forgets the activations"
    for linear, scheme in activations.items():
        problem = "" if scheme.format in _KINDS else f"compressed-tensors has no {scheme.format} activations"
        if not packed:
            problem = f"layout {layout} says nothing of activations, and who loads it would leave them alone"
        elif layout == "pack-quantized" and not symmetric:
            problem = zeros
        if problem:
            remedy = "export: checkpoint: {layout: int-quantized} or {layout: float-quantized}"
            raise unsupported(linear, f"activations in {scheme.format}", problem, remedy)
    if cache is None:
        return
    problem = ""
    if cache.granularity not in ("tensor", "head"):
        problem = f"compressed-tensors has no words for a scale by {cache.granularity}"
    elif not cache.symmetric:
        problem = "vLLM reads symmetric caches alone"
    elif not packed and layout != "dense":
        problem = f"layout {layout} has no place for the cache's scales"
    if problem:
        remedy = "--set scheme.kv_cache.granularity=tensor --set scheme.kv_cache.symmetric=true, or another layout"
        value = f"{cache.format} by {cache.granularity}{'' if cache.symmetric else ', asymmetric'}"
        raise unsupported("scheme.kv_cache", value, problem, remedy)


def described(
    config: Mapping[str, Any] | None,
    linears: Sequence[str],
    activations: Mapping[str, ActivationScheme],
    cache: CacheScheme | None,
) -> dict[str, Any] | None:
    """Add to `config`, None for dense weights, how activations and the cache are quantized."""
    if not activations and cache is None:
        return None if config is None else dict(config)
    from compressed_tensors.quantization import QuantizationConfig

    if config is None:
        empty = QuantizationConfig(config_groups={}, format=_DENSE, quantization_status="frozen", ignore=[])
        config = empty.model_dump(mode="json")
    found = dict(config)
    if activations:
        # transformers' other way in expands weights as they are read, and leaves inputs alone
        found.pop("dequantize", None)
        found["config_groups"] = _split(config, linears, activations)
    if cache is not None:
        found["kv_cache_scheme"] = _written(cache)
    return found


def _split(
    config: Mapping[str, Any], linears: Sequence[str], activations: Mapping[str, ActivationScheme]
) -> dict[str, Any]:
    """Split config groups into those whose linears agree on their inputs."""
    schemes = {activations.get(name) for name in linears}
    groups: dict[str, Any] = {}
    for group in config["config_groups"].values():
        everything = group["targets"] == ["Linear"]
        names = linears if everything else group["targets"]
        for scheme in dict.fromkeys(activations.get(name) for name in names):
            targets = [name for name in names if activations.get(name) == scheme]
            targets = ["Linear"] if everything and len(schemes) == 1 else targets
            inputs = None if scheme is None else _written(scheme)
            groups[f"group_{len(groups)}"] = {**group, "targets": targets, "input_activations": inputs}
    return groups


def _written(scheme: ActivationScheme | CacheScheme) -> dict[str, Any]:
    """Write a scheme as the library's `QuantizationArgs` are."""
    from compressed_tensors.quantization import QuantizationArgs

    arguments = QuantizationArgs(
        num_bits=8,
        type=_KINDS[scheme.format],
        symmetric=scheme.symmetric,
        strategy=_STRATEGIES[scheme.granularity],
        group_size=getattr(scheme, "group", None),
        dynamic=scheme.dynamic,
    )
    written: dict[str, Any] = arguments.model_dump(mode="json")
    return written


def read(
    config: Mapping[str, Any] | None,
    linears: Iterable[str],
    entries: Iterable[str],
    tensor: Callable[[str], torch.Tensor],
) -> RunTime:
    """Read what a checkpoint's `quantization_config` says of the linears in its blocks, by their full names."""
    from quantkit.formats.base.activation import InputScale

    if not config or config.get("quant_method") != "compressed-tensors":
        return RunTime()
    stored = [name for name in entries if name.endswith(PARTS)]
    activations: dict[str, ActivationScheme] = {}
    scales: dict[str, InputScale] = {}
    for linear in linears:
        scheme = _inputs_of(config, linear)
        if scheme is None:
            continue
        activations[linear] = scheme
        if not scheme.dynamic:
            prefix = next(name for name in stored if same(name, linear + INPUT_SCALE)).removesuffix(INPUT_SCALE)
            zero = None if scheme.symmetric else tensor(prefix + INPUT_ZERO)
            scales[linear] = InputScale(tensor(prefix + INPUT_SCALE), zero)
    cache = config.get("kv_cache_scheme")
    cache_scales: dict[int, tuple[InputScale, InputScale]] = {}
    for name in stored if cache else ():
        number = _NUMBER.search(name)
        if name.endswith(KEY_SCALE) and number is not None:
            values = name.removesuffix(KEY_SCALE) + VALUE_SCALE
            cache_scales[int(number.group(1))] = (InputScale(tensor(name)), InputScale(tensor(values)))
    return RunTime(activations, scales, CacheScheme.model_validate(_fields(cache)) if cache else None, cache_scales)


def weights_are_dense(config: Mapping[str, Any]) -> bool:
    """Tell whether a `quantization_config` is about inputs or the cache alone."""
    return config.get("format") == _DENSE


def expands_at_load(folder: Path) -> bool:
    """Tell whether transformers expands weights as it loads a checkpoint, and then knows no more of its scheme."""
    config = strict_json(limits.read(folder / "config.json"), "config.json", "config-invalid")
    return bool((config.get("quantization_config") or {}).get("dequantize"))


def is_named(config: Mapping[str, Any] | None) -> bool:
    """Tell whether a `quantization_config` says that inputs or the cache are quantized."""
    groups = ((config or {}).get("config_groups") or {}).values()
    return bool((config or {}).get("kv_cache_scheme")) or any(group.get("input_activations") for group in groups)


def _inputs_of(config: Mapping[str, Any], linear: str) -> ActivationScheme | None:
    """Read the scheme of a linear's input: of the group that names it, else of the one for its class."""
    if any(same(linear, name) for name in config.get("ignore") or ()):
        return None
    groups = list(config["config_groups"].values())
    named = [group for group in groups if any(same(linear, target) for target in group["targets"])]
    chosen = (named or [group for group in groups if group["targets"] == ["Linear"]] or [{}])[0]
    found = chosen.get("input_activations")
    if not found:
        return None
    more = {"dynamic": bool(found["dynamic"]), "group": found.get("group_size")}
    return ActivationScheme.model_validate({**_fields(found), **more})


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Read what both kinds of scheme have, from the library's arguments."""
    formats = {kind: name for name, kind in _KINDS.items()}
    granularities = {strategy: name for name, strategy in _STRATEGIES.items()}
    return {
        "format": formats[arguments["type"]],
        "granularity": granularities[arguments["strategy"]],
        "symmetric": arguments["symmetric"],
    }


def attention_of(block: nn.Module) -> str:
    """Find the module of a block that the library gives its cache's scales to; `layout-unsupported`."""
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module

    found: list[str] = [name for name, module in block.named_modules() if is_cached_attention_module(module)]
    if len(found) != 1:
        rule = "compressed-tensors quantizes the cache of attentions that it knows by these names"
        value = f"{len(found)} attentions with k_proj and v_proj"
        raise unsupported(type(block).__name__, value, rule, "--set scheme.kv_cache=null")
    return found[0]
