"""What a step of a GGUF file must move and compute: from its tensors, without loading them.

llama.cpp rounds the inputs of a product to 8 bits where the weight has codes, so such a file computes in integers;
keys and values are kept in float16.
"""

from __future__ import annotations

import math
from pathlib import Path

from quantkit.errors import MissingDependency
from quantkit.exporters.gguf.types import FLOATS
from quantkit.measurement.operators.tax import StepCost
from quantkit.runtimes.llama_cpp.session import AttentionSizes

_TABLE, _HEAD = "token_embd.weight", "output.weight"
_CACHE_BYTES = 2.0


def cost_of_file(path: Path, sizes: AttentionSizes, form: str) -> StepCost:
    """The cost of a step.

    Args:
        path: of the file.
        sizes: of attention.
        form: how rows call the format of its weights.

    Raises:
        MissingDependency: gguf.
    """
    with MissingDependency.unless_found("gguf", extra="gguf", purpose="measuring speed"):
        import gguf
    from quantkit.model.source.gguf import demand_lengths

    read: dict[str, float] = {}
    products: dict[str, int] = {}  # matrices: elements
    floats = set()
    for name, (shape, number) in demand_lengths(path).items():
        kind, elements = gguf.GGMLQuantizationType(number), math.prod(shape)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        read[name] = elements / block * size
        if len(shape) > 1:
            products[name] = elements
            floats |= {name} if kind.name in FLOATS.values() else set()
    if _HEAD in read:  # of a table of its own a token reads one row
        del read[_TABLE], products[_TABLE]
    head_flops = 2.0 * products.get(_HEAD, products.get(_TABLE, 0))
    inside = sum(elements for name, elements in products.items() if name not in (_HEAD, _TABLE))
    return StepCost(
        form,
        sum(read.values()),
        2 * _CACHE_BYTES * sizes.layers * sizes.kv_heads * sizes.head_dim,
        2.0 * inside,
        4.0 * sizes.layers * sizes.heads * sizes.head_dim,
        head_flops=head_flops,
        io_bytes_per_token=4.0 * sizes.vocabulary,
        float_bytes=sum(read[name] for name in floats & read.keys()),
        float_head_flops=head_flops if floats & {_HEAD, _TABLE} & products.keys() else 0.0,
        compute="fp32" if products.keys() <= floats else "int8",
    )
