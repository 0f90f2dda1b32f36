"""What plain transformers cannot load of a packed checkpoint, whatever the layout would hold.

transformers finds a packed linear's parts by a rule that looks for `weight`, `weight_packed`, … anywhere in a tensor's
name, and takes the first place: a linear that is itself called `…weight` is not found. And where it loads a quantized
checkpoint it puts another class in the place of some modules (`MODULES_TO_PATCH_FOR_QUANTIZATION` in
`quantizers/base.py`), whose parameters have other names than the files of the original.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from quantkit.errors import InputError

_CALLED_WEIGHT = re.compile(r"weight(?!\w)")
_FINDS_BY_NAME = "compressed_tensors"


def demand_loadable(
    libraries: Collection[str], linears: Iterable[str], replaced: Mapping[str, Collection[str]]
) -> None:
    """Refuse what transformers would not find in a packed checkpoint.

    Args:
        libraries: what transformers loads the layout with, by import names.
        linears: those to be packed.
        replaced: module -> the libraries with which transformers puts another one in its place.

    Raises:
        InputError: `layout-unsupported`.
    """
    for module, others in replaced.items():
        if not set(others).isdisjoint(libraries):
            raise _refusal(module, "transformers puts another class in its place where it loads a packed checkpoint")
    for linear in linears:
        if _FINDS_BY_NAME in libraries and _CALLED_WEIGHT.search(linear):
            raise _refusal(linear, "transformers does not find a packed linear whose name ends in `weight`")


def _refusal(where: str, value: str) -> InputError:
    return InputError(
        "layout-unsupported",
        where=where,
        value=value,
        rule="what is written, plain transformers loads",
        remedy="export: checkpoint: {layout: dense}",
    )
