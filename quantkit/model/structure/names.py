"""Which tensor of the files fills which parameter of the skeleton.

Names differ for three reasons: the class has the base model under a prefix that the file lacks, or lacks it where the
file has it (`h.0.ln_1.weight` and `transformer.h.0.ln_1.weight`); a name was changed since the file was written
(`LayerNorm.gamma`); a tied parameter is stored once. The first two are transformers' own rules, applied by its own
function; the third follows the skeleton, in which tied parameters are one object. Tensors that loading joins or cuts
have the parameters' names already: `model.converted`.

What is left over must not matter: a tensor inside a block, or of a module that the skeleton has, means that the config
describes another model (a bias that would silently be dropped), and is an error; a pooler or head that the class does
not have is listed as unused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from quantkit.model.source.weights import Weights

_FLOATS = ("F32", "F16", "BF16")


def same(name: str, other: str) -> bool:
    """Whether two names are one but for the base model's prefix, which the files may lack or have."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


@dataclass(frozen=True)
class Names:
    """`files`: parameter or persistent buffer of the skeleton -> tensor of the files; `unused`: the other tensors."""

    files: dict[str, str]
    unused: list[str]


def match_names(weights: Weights, skeleton: PreTrainedModel) -> Names:
    """Assigns a tensor of the files to every parameter and persistent buffer.

    Raises:
        InputError: `weights-missing`, `weights-shape`, `weights-dtype`, `weights-unexpected`, `weights-ambiguous`,
            `weights-tied`, `architecture-unsupported` (stacked experts that cannot be taken apart).
    """
    wanted = skeleton.state_dict(keep_vars=True)
    stored = _renamed(weights, skeleton, wanted)
    twins: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        twins.setdefault(id(tensor), []).append(name)
    files = {}
    for name, tensor in wanted.items():
        candidates = [stored[twin] for twin in [name, *twins[id(tensor)]] if twin in stored]
        if not candidates:
            raise _missing(name, wanted, stored, weights)
        files[name] = candidates[0]
        _check_shape(name, tensor, candidates[0], weights)
    for names in twins.values():
        held = list(dict.fromkeys(stored[name] for name in names if name in stored))
        for other in held[1:]:
            if not weights.same(held[0], other):
                raise InputError(
                    "weights-tied",
                    where=other,
                    value=f"differs from {held[0]}",
                    rule="config.json ties them to be one tensor",
                    remedy='set "tie_word_embeddings": false in config.json',
                )
        files.update(dict.fromkeys(names, files[names[0]]))
    unused = [file for name, file in stored.items() if name not in wanted]
    _check_unused(unused, {file: name for name, file in stored.items()}, skeleton)
    return Names(files, sorted(unused))


def merging_rules(skeleton: PreTrainedModel) -> list[Any]:
    """transformers' rules by which several tensors of the files become one parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [each for each in get_model_conversion_mapping(skeleton) if not isinstance(each, WeightRenaming)]


def rename(
    file: str, mapping: Sequence[Any], rules: Sequence[Any], prefix: str, wanted: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """The name in the skeleton's terms of a tensor of the files, and the pattern of the rule that applies, as loading
    does it.

    Args:
        mapping: transformers' rules for the skeleton, of which those that only rename are used.
        rules: the `WeightConverter`s that count.
        prefix: of the base model.
        wanted: the skeleton's parameters and persistent buffers.
    """
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    found: tuple[str, str | None] = rename_source_key(file, renamings, rules, prefix, wanted)
    if found[0] not in wanted and file in wanted:  # a renaming that is for another part of the model, as when loading
        found = rename_source_key(file, [], [], prefix, wanted)
    return found


def _renamed(weights: Weights, skeleton: PreTrainedModel, wanted: dict[str, Tensor]) -> dict[str, str]:
    """Name in the skeleton's terms -> name in the file, for all tensors of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    from quantkit.model.structure.experts import other_rules

    mapping, prefix = get_model_conversion_mapping(skeleton), skeleton.base_model_prefix
    converters = other_rules(skeleton, merging_rules(skeleton))
    stored: dict[str, str] = {}
    for file in sorted(weights.entries):  # some renamings depend on the order
        name, converted = rename(file, mapping, converters, prefix, wanted)
        if converted is not None and name in wanted:
            raise InputError(
                "architecture-unsupported",
                where=file,
                value=f"becomes part of {name} while loading",
                rule="a parameter is one tensor of the files (of stacked experts, only gated ones are taken apart)",
            )
        if converted is not None:  # of no parameter: several would have one name
            name, _ = rename(file, mapping, [], prefix, wanted)
        if name in stored:
            raise InputError(
                "weights-ambiguous", where=name, value=f"both {stored[name]} and {file} fill it", rule="one tensor does"
            )
        stored[name] = file
    return stored


def _missing(name: str, wanted: dict[str, Tensor], stored: dict[str, str], weights: Weights) -> InputError:
    absent = sum(other not in stored for other in wanted)
    return InputError(
        "weights-missing",
        where=name,
        value=f"no tensor in {', '.join(weights.shards[:3])} fills it ({absent} of {len(wanted)} are missing)",
        rule="the files hold every parameter of the architecture in config.json",
        remedy="check config.json against the weights, or download them again",
    )


def _check_shape(name: str, tensor: Tensor, file: str, weights: Weights) -> None:
    entry = weights.entries[file]
    if entry.shape != tuple(tensor.shape):
        raise InputError(
            "weights-shape",
            where=f"{entry.shard}: {file}",
            value=f"shape {list(entry.shape)}",
            rule=f"config.json makes {name} {list(tensor.shape)}",
            remedy="check config.json against the weights",
        )
    if tensor.is_floating_point() and entry.dtype not in _FLOATS:
        # the header can claim any dtype of the right size; integers would be cast to weights without a word
        raise InputError(
            "weights-dtype",
            where=f"{entry.shard}: {file}",
            value=f"stored as {entry.dtype}",
            rule="weights are stored in float32, float16 or bfloat16",
            remedy="convert the checkpoint to one of them, or download it again",
        )


def _check_unused(unused: list[str], renamed: dict[str, str], skeleton: PreTrainedModel) -> None:
    from torch import nn

    modules = dict(skeleton.named_modules())
    lists = {path: len(module) for path, module in modules.items() if isinstance(module, nn.ModuleList)}
    blocks, drafts = tuple(f"{path}." for path in lists), getattr(skeleton.config, "num_nextn_predict_layers", 0)
    computed = {name for name, _ in skeleton.named_buffers()}  # not stored nowadays: masks, rotary tables
    harmless = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(skeleton._keys_to_ignore_on_load_unexpected or ())]
    for file in unused:
        name = renamed[file]
        if name in computed or any(re.search(pattern, name) for pattern in harmless):
            continue
        # draft heads are numbered on behind the last block
        if isinstance(drafts, int) and any(
            _number(name, path) in range(end, end + drafts) for path, end in lists.items()
        ):
            continue
        owner = name.rpartition(".")[0]
        if (owner and owner in modules) or name.startswith(blocks):
            raise InputError(
                "weights-unexpected",
                where=file,
                value="the architecture in config.json has no such parameter",
                rule="what the files hold inside a block is used",
                remedy="check config.json (number of layers, biases) against the weights",
            )


def _number(name: str, path: str) -> int:
    """The number of the block of a list that a tensor is in; -1 of none."""
    number = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
    return int(number) if number.isdecimal() and len(number) < 10 else -1
