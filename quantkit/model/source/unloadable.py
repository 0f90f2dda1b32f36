"""What plain transformers cannot load of a packed checkpoint, however well the layout holds it.

Found in its own rules and tables, before any work. Nothing is known of any model.

- It puts another class in the place of some modules where a checkpoint is quantized (`quantizers/base.py`); the
  parameters of that class have other names than the files of the original.
- compressed-tensors' parts join a rule that makes a linear's weight of tensors of the files, and a rule may then not
  give several.
- compressed-tensors' parts are found by a pattern that takes the first `weight` in a tensor's name: a linear that is
  itself called `…weight` is not found.
- A name in the files that transformers changes while loading may not be changed so with a part's suffix behind it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CALLED_WEIGHT = re.compile(r"weight(?!\w)")
_COMPRESSED = frozenset(["compressed_tensors"])
_WEIGHT, _PART = ".weight", ".weight_packed"


@dataclass(frozen=True)
class Obstacle:
    """Something that transformers would not load.

    Args:
        where: the linear or module; a linear that is not packed is none.
        libraries: with which of them, by import names; none is all.
        always: whether it is in the way whatever is packed.
    """

    where: str
    why: str
    libraries: frozenset[str] = frozenset()
    always: bool = False

    def hinders(self, linears: Collection[str], libraries: Collection[str]) -> bool:
        """Whether a checkpoint with these linears packed, by a layout that these libraries load, cannot be loaded."""
        if self.libraries and self.libraries.isdisjoint(libraries):
            return False
        return self.always or self.where in linears


def obstacles(skeleton: PreTrainedModel, files: Mapping[str, str]) -> list[Obstacle]:
    """All of a model.

    Args:
        files: its parameters -> tensors of the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    from quantkit.model.structure.traced import is_linear

    mapping = get_model_conversion_mapping(skeleton)
    found = _replaced(skeleton)
    for rule in mapping:
        sources, targets = rule.source_patterns, rule.target_patterns
        gathers = isinstance(rule, WeightConverter) and all(source.endswith(_WEIGHT) for source in sources)
        if gathers and len(targets) > 1:
            why = f"transformers has a rule that cuts {sources[0]}, which takes no packed linears of the model"
            found.append(Obstacle(type(skeleton).__name__, why, _COMPRESSED, always=True))
    linears = [name for name, module in skeleton.named_modules() if is_linear(module)]
    why = "transformers does not find a packed linear whose name ends in `weight`"
    found += [Obstacle(linear, why, _COMPRESSED) for linear in linears if _CALLED_WEIGHT.search(linear)]
    return found + _misnamed(skeleton, files, linears, mapping)


def _replaced(skeleton: PreTrainedModel) -> list[Obstacle]:
    from transformers.quantizers import base

    table: Mapping[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    why = "transformers puts another class in its place where it loads a packed checkpoint"
    return [
        Obstacle(path, why, frozenset(_library(each) for each in table[name]["quantization_methods"]), always=True)
        for path, module in skeleton.named_modules()
        if (name := type(module).__name__) in table
    ]


def _library(method: Any) -> str:
    """`compressed-tensors` -> `compressed_tensors`."""
    return str(method.value).replace("-", "_")


def _misnamed(
    skeleton: PreTrainedModel, files: Mapping[str, str], linears: Iterable[str], mapping: Sequence[Any]
) -> list[Obstacle]:
    """Linears whose parts loading would give other names than the weight; asked in the order of all files, since some
    rules remember what they have seen."""
    from quantkit.model.structure.names import rename, same

    owners: dict[str, list[str]] = {}
    for name, file in files.items():
        owners.setdefault(file, []).append(name)
    weights = {linear + _WEIGHT for linear in linears}
    found, wanted = [], skeleton.state_dict(keep_vars=True)
    for file, names in sorted(owners.items()):
        packs = len(names) == 1 and names[0] in weights  # what is shared is not packed
        part = file.removesuffix(_WEIGHT) + _PART if packs else file
        loaded = rename(part, mapping, [], skeleton.base_model_prefix, wanted)[0]
        linear = names[0].removesuffix(_WEIGHT)
        if packs and not same(loaded, linear + _PART):
            found.append(Obstacle(linear, f"transformers loads {file}, but nothing packed under that name"))
    return found
