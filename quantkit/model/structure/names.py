"""Matching of the files' tensors with the skeleton's parameters, and obstacles to loading packed weights in
transformers.

Names differ for three reasons: the class has the base model under a prefix that the file lacks, or the reverse
(`h.0.ln_1.weight` and `transformer.h.0.ln_1.weight`); a name has changed since the file was written
(`LayerNorm.gamma`); a tied parameter is stored once. The first two follow transformers' own rules and function; the
third follows the skeleton, in which tied parameters are one object.

Unmatched tensors must not matter. One inside a block, or of a module in the skeleton, means that the config describes
another model (a bias that would silently be dropped), and is an error. A pooler or head that the class lacks is
ignored.

Obstacles come from transformers' own rules and tables, before any work: a module whose class is replaced for quantized
checkpoints, with other parameters (`quantizers/base.py`); a rule that makes a linear's weight from several tensors,
which compressed-tensors cannot combine with its parts; a linear named `…weight`, since compressed-tensors matches the
first `weight` in a name; and a name that loading changes, but not with a part's suffix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from quantkit.model.layouts import Layout
    from quantkit.model.source.weights import Weights

_FLOATS = ("F32", "F16", "BF16")
_CALLED_WEIGHT = re.compile(r"weight(?!\w)")
_COMPRESSED, _BITSANDBYTES = frozenset(["compressed_tensors"]), frozenset(["bitsandbytes"])
_WEIGHT, _PART = ".weight", ".weight_packed"


def same(name: str, other: str) -> bool:
    """Tell whether two names are equal up to the base model's prefix."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def names_it(linear: str, target: str) -> bool:
    """Tell whether a target of compressed-tensors names a linear: its name, or a regular expression behind `re:`."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), linear) is not None
    return same(linear, target)


def match_names(weights: Weights, skeleton: PreTrainedModel) -> dict[str, str]:
    """Match every parameter and persistent buffer with a tensor of the files.

    Raises:
        InputError: `weights-missing`, `weights-shape`, `weights-dtype`, `weights-unexpected`, `weights-ambiguous`,
            `weights-tied`; `architecture-unsupported` for stacked experts that cannot be split.
    """
    wanted = skeleton.state_dict(keep_vars=True)
    stored = _renamed(weights, skeleton, wanted)
    twins: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        twins.setdefault(id(tensor), []).append(name)
    files = {}
    for name, tensor in wanted.items():
        candidates = [stored[twin] for twin in [name, *twins[id(tensor)]] if twin in stored]
        if not candidates and not tensor.is_meta:  # the skeleton has computed it
            continue
        if not candidates:
            absent = sum(other not in stored for other in wanted)
            shards = ", ".join(weights.shards[:3])
            value = f"no tensor in {shards} fills it ({absent} of {len(wanted)} are missing)"
            rule = "the files hold every parameter of the architecture in config.json"
            remedy = "check config.json against the weights, or download them again"
            raise InputError("weights-missing", name, value, rule, remedy)
        files[name] = candidates[0]
        _check_shape(name, tensor, candidates[0], weights)
    for names in twins.values():
        held = list(dict.fromkeys(stored[name] for name in names if name in stored))
        for other in held[1:]:
            if not weights.same(held[0], other):
                rule, remedy = (
                    "config.json ties them to be one tensor",
                    'set "tie_word_embeddings": false in config.json',
                )
                raise InputError("weights-tied", other, f"differs from {held[0]}", rule, remedy)
        if names[0] in files:
            files.update(dict.fromkeys(names, files[names[0]]))
    _check_unused({file: name for name, file in stored.items() if name not in wanted}, skeleton)
    return files


def merging_rules(skeleton: PreTrainedModel) -> list[Any]:
    """List transformers' rules for merging several tensors of the files into one parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [rule for rule in get_model_conversion_mapping(skeleton) if not isinstance(rule, WeightRenaming)]


def rename(
    file: str, mapping: Sequence[Any], rules: Sequence[Any], prefix: str, wanted: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """Return the skeleton's name of a tensor of the files, and the pattern of the rule that applies, as loading does.

    Args:
        mapping: transformers' rules for the skeleton; only renamings are used.
        rules: `WeightConverter`s to apply.
        prefix: prefix of the base model.
        wanted: the skeleton's parameters and persistent buffers.
    """
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    renamed: tuple[str, str | None] = rename_source_key(file, renamings, rules, prefix, wanted)
    if renamed[0] not in wanted and file in wanted:  # a renaming for another part of the model
        renamed = rename_source_key(file, [], [], prefix, wanted)
    return renamed


def _renamed(weights: Weights, skeleton: PreTrainedModel, wanted: dict[str, Tensor]) -> dict[str, str]:
    """Map the skeleton's name to the file's name, for all tensors of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    from quantkit.model.structure.experts import other_rules

    mapping, prefix = get_model_conversion_mapping(skeleton), skeleton.base_model_prefix
    converters = other_rules(skeleton, merging_rules(skeleton))
    stored: dict[str, str] = {}
    for file in sorted(weights.entries):  # some renamings depend on the order
        name, converted = rename(file, mapping, converters, prefix, wanted)
        if converted is not None and name in wanted:
            rule = "a parameter is one tensor of the files (only gated experts can be split)"
            raise InputError("architecture-unsupported", file, f"becomes part of {name} while loading", rule)
        if converted is not None:  # without a parameter, several would have one name
            name, _ = rename(file, mapping, [], prefix, wanted)
        if name in stored:
            raise InputError("weights-ambiguous", name, f"both {stored[name]} and {file} fill it", "one tensor does")
        stored[name] = file
    return stored


def _check_shape(name: str, tensor: Tensor, file: str, weights: Weights) -> None:
    entry = weights.entries[file]
    where = f"{entry.shard}: {file}"
    if entry.shape != tuple(tensor.shape):
        rule = f"config.json makes {name} {list(tensor.shape)}"
        remedy = "check config.json against the weights"
        raise InputError("weights-shape", where, f"shape {list(entry.shape)}", rule, remedy)
    if tensor.is_floating_point() and entry.dtype not in _FLOATS:
        # the header can claim any dtype of the right size; integers would be cast to weights without a word
        rule = "weights are stored in float32, float16 or bfloat16"
        remedy = "convert the checkpoint to one of them, or download it again"
        raise InputError("weights-dtype", where, f"stored as {entry.dtype}", rule, remedy)


def _check_unused(unused: Mapping[str, str], skeleton: PreTrainedModel) -> None:
    """Refuse unused tensors of the files (-> names in the skeleton) that matter."""
    from torch import nn

    modules = dict(skeleton.named_modules())
    lists = {path: len(module) for path, module in modules.items() if isinstance(module, nn.ModuleList)}
    drafts = getattr(skeleton.config, "num_nextn_predict_layers", 0)
    computed = {name for name, _ in skeleton.named_buffers()}  # not stored nowadays: masks, rotary tables
    harmless = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(skeleton._keys_to_ignore_on_load_unexpected or ())]
    # draft heads are numbered on behind the last block
    behind = {path: range(end, end + drafts) for path, end in lists.items()} if isinstance(drafts, int) else {}
    for file, name in unused.items():
        if name in computed or any(re.search(pattern, name) for pattern in harmless):
            continue
        if any(_number(name, path) in numbers for path, numbers in behind.items()):
            continue
        owner = name.rpartition(".")[0]
        if (owner and owner in modules) or name.startswith(tuple(f"{path}." for path in lists)):
            value = "the architecture in config.json has no such parameter"
            rule = "every tensor inside a block must be used"
            remedy = "check config.json (number of layers, biases) against the weights"
            raise InputError("weights-unexpected", file, value, rule, remedy)


def drafts(skeleton: PreTrainedModel, file: str) -> bool:
    """Tell whether a tensor without a parameter belongs to a head that drafts tokens (multi-token prediction)."""
    from torch import nn

    if "mtp" in file.split("."):
        return True
    count = getattr(skeleton.config, "num_nextn_predict_layers", 0)
    for path, module in skeleton.named_modules():
        if isinstance(module, nn.ModuleList) and isinstance(count, int):
            place = re.search(rf"(^|\.){re.escape(path.rpartition('.')[2])}\.(\d{{1,9}})\.", file)
            if place and len(module) <= int(place[2]) < len(module) + count:
                return True
    return False


def _number(name: str, path: str) -> int:
    """Return the number of a tensor's block in a list; -1 for none."""
    number = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
    return int(number) if number.isdecimal() and len(number) < 10 else -1


# --- what cannot be loaded ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """Something that transformers would fail to load.

    Args:
        where: the linear or module; an unpacked linear is no obstacle.
        why: reason.
        libraries: import names of the libraries concerned; empty for all.
        always: True if it does not depend on the packed linears.
        spared: import names of the libraries that are not concerned.
        merged: True for an expert's linear that transformers holds in one tensor with the others.
    """

    where: str
    why: str
    libraries: frozenset[str] = frozenset()
    always: bool = False
    spared: frozenset[str] = frozenset()
    merged: bool = False

    def hinders(self, linears: Collection[str], libraries: Collection[str]) -> bool:
        """Tell whether a checkpoint with these packed linears, in a layout of these libraries, fails to load."""
        if (self.libraries and self.libraries.isdisjoint(libraries)) or not self.spared.isdisjoint(libraries):
            return False
        return self.always or self.where in linears


def obstacles(skeleton: PreTrainedModel, files: Mapping[str, str]) -> list[Obstacle]:
    """List all obstacles of a model; `files` maps its parameters to tensors of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter
    from transformers.quantizers.quantizers_utils import should_convert_module

    from quantkit.model.structure.experts import found_in, parts_of
    from quantkit.model.structure.traced import is_linear

    mapping = get_model_conversion_mapping(skeleton)
    why = "transformers replaces its class when it loads a packed checkpoint"
    single = apart(skeleton)
    listed = [
        Obstacle(path, why, methods, always=True) for path, _, methods in _replaced(skeleton) if path not in single
    ]
    why = "transformers holds it in one tensor with the other experts, and has no rule for packed ones"
    for path, experts in found_in(skeleton).items():
        merged = (
            part for name in experts.cuts if name not in experts.by_rule for part in parts_of(experts, path, name)
        )
        spared = single.get(path, frozenset())
        listed += [Obstacle(part.removesuffix(_WEIGHT), why, spared=spared, merged=True) for part in merged]
    for rule in mapping:
        sources = rule.source_patterns
        gathers = isinstance(rule, WeightConverter) and all(source.endswith(_WEIGHT) for source in sources)
        if gathers and len(rule.target_patterns) > 1:
            why = f"transformers has a rule that cuts {sources[0]}, which fails on packed linears"
            listed.append(Obstacle(type(skeleton).__name__, why, _COMPRESSED, always=True))
    linears = [name for name, module in skeleton.named_modules() if is_linear(module)]
    why = "transformers cannot load a packed linear whose name ends in `weight`"
    listed += [Obstacle(linear, why, _COMPRESSED) for linear in linears if _CALLED_WEIGHT.search(linear)]
    why, kept = "transformers keeps it in floats with bitsandbytes", skeleton._keep_in_fp32_modules or ()
    floats = [linear for linear in linears if not should_convert_module(linear, list(kept))]
    listed += [Obstacle(linear, why, _BITSANDBYTES) for linear in floats]
    return listed + _misnamed(skeleton, files, linears, mapping)


def apart(skeleton: PreTrainedModel) -> dict[str, frozenset[str]]:
    """Map modules of experts -> libraries with which transformers loads a packed checkpoint's experts as linears.

    It then has a module of linears in the place of the merged ones; their names must be ours.
    """
    from quantkit.model.structure.experts import Experts

    known: dict[str, frozenset[str]] = {}
    for path, other, methods in _replaced(skeleton):
        module = skeleton.get_submodule(path)
        if not isinstance(module, Experts):
            continue
        with torch.device("meta"):
            theirs = other(skeleton.config.get_text_config()).state_dict()
        if {name: value.shape for name, value in theirs.items()} == {
            name: value.shape for name, value in module.state_dict().items()
        }:
            known[path] = methods
    return known


def named(files: Mapping[str, str], prefixes: Iterable[str]) -> set[str]:
    """Return a class's names of linears in the files; `files` maps its parameters to tensors."""
    stored = {f"{prefix}{_WEIGHT}" for prefix in prefixes}
    return {name.removesuffix(_WEIGHT) for name, file in files.items() if file in stored}


def unpacks_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether transformers' rules unpack the experts of a checkpoint with this `quantization_config`: integers of
    one scheme, without zero points and with inputs in floats."""
    groups = list((config.get("config_groups") or {}).values())
    plain = all(group["weights"].get("symmetric", True) and not group.get("input_activations") for group in groups)
    return config.get("format") == "pack-quantized" and len(groups) == 1 and plain


def unread_experts(
    skeleton: PreTrainedModel, layout: Layout, packed: Collection[str], config: Mapping[str, Any]
) -> list[str]:
    """List packed linears of experts that transformers would not load: it holds them in one tensor, without a rule.

    Args:
        config: `quantization_config` of the checkpoint.
    """
    from quantkit.model.structure.experts import found_in, parts_of

    if layout.stacks:
        return []
    known, libraries = apart(skeleton), set(layout.libraries)
    unpacked = unpacks_experts(config)
    return [
        linear
        for path, experts in found_in(skeleton).items()
        if libraries.isdisjoint(known.get(path, ()))
        for name in experts.cuts
        if name not in experts.by_rule or not unpacked
        for part in parts_of(experts, path, name)
        if (linear := part.removesuffix(_WEIGHT)) in packed
    ]


def _replaced(skeleton: PreTrainedModel) -> list[tuple[str, Any, frozenset[str]]]:
    """List the modules with another class in packed checkpoints: path, this class, libraries."""
    from transformers.quantizers import base

    table: Mapping[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    listed = []
    for path, module in skeleton.named_modules():
        if (entry := table.get(type(module).__name__)) is not None:
            methods = (str(method.value).replace("-", "_") for method in entry["quantization_methods"])
            listed.append((path, entry["module_name"], frozenset(methods)))
    return listed


def _misnamed(
    skeleton: PreTrainedModel, files: Mapping[str, str], linears: Iterable[str], mapping: Sequence[Any]
) -> list[Obstacle]:
    """List linears with parts renamed differently from the weight on loading.

    Files are visited in the order of loading, since some rules keep state.
    """
    owners: dict[str, list[str]] = {}
    for name, file in files.items():
        owners.setdefault(file, []).append(name)
    weights = {linear + _WEIGHT for linear in linears}
    listed, wanted = [], skeleton.state_dict(keep_vars=True)
    for file, names in sorted(owners.items()):
        packs = len(names) == 1 and names[0] in weights  # shared weights are not packed
        part = file.removesuffix(_WEIGHT) + _PART if packs else file
        loaded = rename(part, mapping, [], skeleton.base_model_prefix, wanted)[0]
        linear = names[0].removesuffix(_WEIGHT)
        if packs and not same(loaded, linear + _PART):
            listed.append(Obstacle(linear, f"transformers loads {file}, but nothing packed under that name"))
    return listed
