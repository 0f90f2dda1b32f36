"""Quantization of linears' inputs, and of keys and values, in a checkpoint's configuration.

compressed-tensors' `quantization_config` has an `input_activations` in each config group and a `kv_cache_scheme`. Fixed
scales are stored beside the weights, as `LINEAR.input_scale` and `ATTENTION.k_scale`, `ATTENTION.v_scale`. They are
written and read here for every layout of the weights; `transforms` applies the same to a streamed model.

    cache     tensor [1]   head [H, 1, 1]       no other granularity exists there
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.model.layouts import unsupported
from quantkit.model.layouts._compressed_tensors import group_of
from quantkit.model.source.weights import strict_json
from quantkit.model.structure.names import names_it, same
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
# fixed scale of an input in checkpoints of `fp8`
ACTIVATION_SCALE = ".activation_scale"
_KINDS = {"int8": "int", "fp8_e4m3": "float"}
_DENSE = "dense"
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_STRATEGIES = {"tensor": "tensor", "token": "token", "group": "group", "head": "attn_head"}


@dataclass(frozen=True)
class RunTime:
    """Quantization of inputs and cache at run time.

    Args:
        activations: full name of a linear -> scheme of its input.
        scales: full name of a linear -> fixed scale of its input.
        cache: scheme of keys and values.
        cache_scales: number of a block -> fixed scales of keys and of values.
    """

    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    scales: Mapping[str, InputScale] = field(default_factory=dict)
    cache: CacheScheme | None = None
    cache_scales: Mapping[int, tuple[InputScale, InputScale]] = field(default_factory=dict)

    def transforms(self, block_names: Sequence[str], dtype: torch.dtype, *, library: bool = False) -> list[Transform]:
        """Return the transforms of blocks for a model with this stored dtype; `library` as in `QuantizedInput`."""
        from quantkit.model.streaming.transforms import QuantizedCaches, QuantizedInputs

        transforms: list[Transform] = []
        if self.activations:
            how = QuantizedInputs(list(block_names), self.activations, self.scales, dtype, library=library)
            transforms.append(how)
        if self.cache is not None:
            transforms.append(QuantizedCaches(self.cache, self.cache_scales, dtype))
        return transforms


def of_results(finished: Finished, blocks: Sequence[str] = ()) -> RunTime:
    """Read the results of the passes; scales of the cache for these blocks."""
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
    """Refuse schemes without a form in a checkpoint of this layout. Raises InputError (`layout-unsupported`)."""
    packed = layout.endswith("quantized")
    zeros = "transformers expands packed weights with zero points on loading, and drops the activations"
    for linear, scheme in activations.items():
        problem, remedy = "", "--set scheme.activations=null"
        if scheme.format not in _KINDS:
            problem = f"compressed-tensors has no {scheme.format} activations"
        elif not packed:
            problem = f"layout {layout} does not store activations, so a reader would not quantize them"
            other = "int-quantized" if scheme.format.startswith("int") else "float-quantized"
            remedy = f"--set 'export=[{{checkpoint: {{layout: {other}}}}}]', or {remedy}"
        elif layout == "pack-quantized" and not symmetric:
            problem, remedy = zeros, f"--set scheme.weights.symmetric=true, or {remedy}"
        if problem:
            raise unsupported(linear, f"activations in {scheme.format}", problem, remedy)
    if cache is None:
        return
    problem = ""
    if cache.granularity not in ("tensor", "head"):
        problem = f"compressed-tensors has no scale by {cache.granularity}"
    elif not cache.symmetric:
        problem = "vLLM reads only symmetric caches"
    elif not packed and layout != "dense":
        problem = f"layout {layout} cannot store the cache's scales"
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
    """Add the quantization of activations and cache to `config`, which is None for dense weights."""
    if not activations and cache is None:
        return None if config is None else dict(config)
    from compressed_tensors.quantization import QuantizationConfig

    if config is None:
        empty = QuantizationConfig(config_groups={}, format=_DENSE, quantization_status="frozen", ignore=[])
        config = empty.model_dump(mode="json")
    extended = dict(config)
    if activations:
        # expansion on loading would leave inputs unquantized
        extended.pop("dequantize", None)
        extended["config_groups"] = _split(config, linears, activations)
    if cache is not None:
        extended["kv_cache_scheme"] = _written(cache)
    return extended


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
    """Convert a scheme to the library's `QuantizationArgs`."""
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
    """Read the run-time quantization of the linears in its blocks from a checkpoint's config, by full names."""
    from quantkit.formats.base.activation import InputScale

    method = (config or {}).get("quant_method")
    if not config or method not in ("compressed-tensors", "fp8"):
        return RunTime()
    stored = [name for name in entries if name.endswith((*PARTS, ACTIVATION_SCALE))]
    if method == "fp8":
        return _of_fp8(config, linears, stored, tensor)
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
    """Tell whether a `quantization_config` only concerns inputs or the cache."""
    return config.get("format") == _DENSE


def expands_at_load(folder: Path) -> bool:
    """Tell whether transformers expands the weights of a checkpoint on loading, and then drops their scheme."""
    config = strict_json(limits.read(folder / "config.json"), "config.json", "config-invalid")
    return bool((config.get("quantization_config") or {}).get("dequantize"))


def is_named(config: Mapping[str, Any] | None) -> bool:
    """Tell whether inputs or the cache are quantized under a `quantization_config`."""
    groups = ((config or {}).get("config_groups") or {}).values()
    return bool((config or {}).get("kv_cache_scheme")) or any(group.get("input_activations") for group in groups)


def _inputs_of(config: Mapping[str, Any], linear: str) -> ActivationScheme | None:
    """Read the scheme of a linear's input from the group with its name, else from the one for its class."""
    if any(names_it(linear, name) for name in config.get("ignore") or ()):
        return None
    groups = [group for group in config["config_groups"].values() if isinstance(group, Mapping)]
    if not groups:
        return None
    inputs = groups[group_of(linear, [group["targets"] for group in groups])].get("input_activations")
    if inputs is None or not _is_read(inputs):
        return None
    more = {"dynamic": bool(inputs["dynamic"]), "group": inputs.get("group_size")}
    return ActivationScheme.model_validate({**_fields(inputs), **more})


def _is_read(inputs: Any) -> bool:
    """Tell whether inputs are rounded in a way that `ActivationScheme` has: 8 bits, by token, group or tensor."""
    return bool(inputs and inputs["num_bits"] == 8) and inputs["strategy"] in ("token", "tensor", "group")


def _of_fp8(
    config: Mapping[str, Any], linears: Iterable[str], stored: Sequence[str], tensor: Callable[[str], torch.Tensor]
) -> RunTime:
    """Read the inputs of a checkpoint of `fp8`: by groups as wide as a block, by token without blocks, or static."""
    from quantkit.formats.base.activation import InputScale

    scheme, names = _fp8_inputs(config), list(linears)
    scales: dict[str, InputScale] = {}
    for linear in names if not scheme.dynamic else ():
        part = next((name for name in stored if same(name.rpartition(".")[0], linear)), None)
        if part is not None:
            scales[linear] = InputScale(tensor(part).reshape(1))
    return RunTime({name: scheme for name in names if scheme.dynamic or name in scales}, scales)


def _fp8_inputs(config: Mapping[str, Any]) -> ActivationScheme:
    if config.get("activation_scheme") == "static":
        return ActivationScheme(format="fp8_e4m3", granularity="tensor", dynamic=False)
    block = config.get("weight_block_size")
    if block is None:
        return ActivationScheme(format="fp8_e4m3")
    return ActivationScheme(format="fp8_e4m3", granularity="group", group=int(block[1]))


def words(config: Mapping[str, Any]) -> str:
    """Say how inputs and cache of a quantized source are rounded as it runs; "" for floats."""
    phrases: list[str] = []
    if config.get("quant_method") == "fp8":
        scheme = _fp8_inputs(config)
        phrases.append(f"inputs in {_words_of(scheme)}{'' if scheme.group is None else ', where it divides them'}")
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    for inputs in [group["input_activations"] for group in groups if group.get("input_activations")]:
        if _is_read(inputs):
            scheme = ActivationScheme.model_validate({**_fields(inputs), "group": inputs.get("group_size")})
            phrases.append(f"inputs in {_words_of(scheme)}")
        else:
            kind = f"{inputs['num_bits']}-bit {inputs['type']}s by {inputs['strategy']}"
            phrases.append(f"inputs left in floats (its kernels round them to {kind})")
    if config.get("kv_cache_scheme"):
        phrases.append(f"keys and values in {_fields(config['kv_cache_scheme'])['format']}")
    return ", ".join(dict.fromkeys(phrases))


def _words_of(scheme: ActivationScheme) -> str:
    return f"{scheme.format} by {scheme.granularity}{'' if scheme.group is None else f' of {scheme.group}'}"


def _fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the library's arguments to the fields of both kinds of scheme."""
    formats = {kind: name for name, kind in _KINDS.items()}
    granularities = {strategy: name for name, strategy in _STRATEGIES.items()}
    return {
        "format": formats[arguments["type"]],
        "granularity": granularities[arguments["strategy"]],
        "symmetric": arguments["symmetric"],
    }


def attention_of(block: nn.Module) -> str:
    """Return the module of a block with the scales of its cache in the library; `layout-unsupported`."""
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module

    attentions: list[str] = [name for name, module in block.named_modules() if is_cached_attention_module(module)]
    if len(attentions) != 1:
        rule = "compressed-tensors finds the attention of a cache by these names"
        value = f"{len(attentions)} attentions with k_proj and v_proj"
        raise unsupported(type(block).__name__, value, rule, "--set scheme.kv_cache=null")
    return attentions[0]
