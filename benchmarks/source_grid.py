"""What 4 bits in groups of 32 lose on a model whose weights lie on such a grid already: SmolLM2-135M, GGUF Q4_1.

    python benchmarks/source_grid.py

Q4_1 has groups of 32 with a scale and an offset in floats. `own grid` reads them off the file's blocks, and holds code
times scale plus offset against the weights that are compiled: nothing is lost. `int4` in groups of 32 with zero points
is another grid, because a zero point is a whole number of steps. It is rounded to nearest, over the whole range
(`minmax`) and over the range that loses least (`mse`). Errors are `sum (w' - w)^2 / sum w^2`, the mean of the linears
by their sizes; KL is of the default text.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from harness.process import compiled
from harness.record import parsing, record, show, verdicts

from quantkit.model.source.alias import ALIASES, materialize

MODEL = "smollm2-135m"


def own_grid() -> dict[str, Any]:
    """The file's blocks against the weights that are compiled; the rows of q and k are turned, and left out."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    wanted = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
    wanted |= {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj"}
    lost = total = 0.0
    with safe_open(materialize(ALIASES[MODEL]) / "model.safetensors", "np") as weights:
        for tensor in gguf.GGUFReader(ALIASES[MODEL].source.find(MODEL)).tensors:
            _, number, name, *_ = [*tensor.name.split("."), "", "", ""]
            if tensor.tensor_type.name != "Q4_1" or name not in wanted:
                continue
            # a block: scale, offset (float16), then 16 bytes of codes, low halves first
            blocks = np.asarray(tensor.data).reshape(-1, 20)
            scale, offset = np.split(blocks[:, :4].copy().view(np.float16).astype(np.float64), 2, axis=1)
            codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            weight = weights.get_tensor(f"model.layers.{number}.{wanted[name]}.weight").astype(np.float64)
            lost += float(np.square((codes * scale + offset).reshape(weight.shape) - weight).sum())
            total += float(np.square(weight).sum())
    return {"grid": "own grid", "error": lost / total, "kl": None}


def rounded(how: str, place: Path) -> dict[str, Any]:
    """int4, groups of 32, zero points."""
    changes = ["scheme.weights.group=32", f"rtn.range={how}", "export=[{checkpoint: {}}]"]
    arguments = [f"--set={change}" for change in changes]
    result, done = compiled(MODEL, "rtn-int4", place / how, *arguments, "--no-speed")
    layers = json.loads((place / how / "manifest.json").read_text())["layers"]
    sizes = [math.prod(layer["shape"]) for layer in layers]
    # of a layer it is relative to the layer
    error = sum(size * layer["error"] for size, layer in zip(sizes, layers, strict=True)) / sum(sizes)
    kl = next(row for row in result["measurements"] if row["name"] == "accuracy.kl")
    return {"grid": f"int4, whole zero points, {how}", "error": error, "kl": kl["value"]} | {
        "ci95": kl["ci95"],
        "data": kl["data"],
        "exit": done.status,
    }


def main() -> int:
    parsing(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = [own_grid(), *(rounded(how, Path(place)) for how in ("minmax", "mse"))]
    claim = "int4 in groups of 32 with whole zero points is not lossless on a model from Q4_1; the file's grid is"
    show(claim, rows, {"grid": "grid", "error": "relative squared error:.2g", "kl": "KL:.3f"})
    record("source_grid", claim, rows, {"model": MODEL})
    lossless, *others = rows
    return verdicts(
        {
            "the file's own grid is lossless": lossless["error"] < 1e-12,
            "int4 with whole zero points is not": all(row["error"] > 1e-3 and row["kl"] > 0.05 for row in others),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
