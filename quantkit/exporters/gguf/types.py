"""Which type of ggml holds a scheme. Free of torch, so that a plan can ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.scheme import WeightScheme

BLOCK = 32
# what files hold for floats
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# formats that are called as ggml calls its types
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# of other formats those that a type holds without a loss, in groups of 32: (format, symmetric) -> type
_OWN = {("int4", True): "Q4_0", ("int4", False): "Q4_1", ("int8", True): "Q8_0"}


def type_of(scheme: WeightScheme, where: str = "") -> str:
    """The name that ggml has for a scheme: `Q4_0`.

    Raises:
        InputError: `layout-unsupported`: it has none.
    """
    name = scheme.format.upper()
    if name in TYPES:
        return name
    own = _OWN.get((scheme.format, scheme.symmetric))
    if own is not None and scheme.granularity == "group" and scheme.group == BLOCK and scheme.scale == "float16":
        return own
    if scheme.format in ("int4", "int8"):
        value = f"{scheme.format} by {scheme.granularity}{f' of {scheme.group}' if scheme.group else ''}"
        value += f", {'symmetric' if scheme.symmetric else 'with zero points'}, scales in {scheme.scale}"
        rule = "of such integers a GGUF file holds int4 and symmetric int8, in groups of 32 with float16 scales"
        remedy = "--set scheme.weights.group=32, or leave `gguf` out of `export`"
    else:
        value, rule = f"weights in {scheme.format}", f"a GGUF file holds {', '.join(TYPES).lower()}"
        remedy = "use one of these, or leave `gguf` out of `export`"
    raise InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=remedy)
