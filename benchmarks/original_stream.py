"""Cost of the unquantized model beside the quantized one in `int4-best`, and the bytes that could take its place.

    python benchmarks/original_stream.py
    python benchmarks/original_stream.py --samples 32

A pass that makes up for earlier errors looks at the inputs of every linear in the unquantized model. Another recipe on
the same text computes them again. Read from a folder instead, they are so many bytes: of each block, and of all.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from harness.record import parsing, record, show

COLUMNS = {
    **{"model": "model", "recipe": "recipe", "tokens": "tokens:,"},
    **{"original": "CPU s of the original:.0f", "quantize": "to quantize:.0f", "all": "in all:.0f"},
    **{"block_bytes": "bytes of a block:,.0f", "bytes": "of all:,.0f"},
}


def row(model: str, recipe: str, samples: int) -> dict[str, Any]:
    """Compile with a clock around the original's forward of each block."""
    from quantkit.calibrate.statistics.collected import Stats
    from quantkit.pipeline.compile import asked, compile_model

    inner, spent, held = Stats._originals, 0.0, list[int]()

    def clocked(stats: Stats) -> dict[str, Any]:
        nonlocal spent
        began = time.process_time()
        kept = inner(stats)
        spent += time.process_time() - began
        held.append(sum(tensor.nbytes for tensor in kept.values()))
        return kept

    Stats._originals = clocked  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"calibration.samples={samples}"]
        request = asked(model, recipe=recipe, changes=changes, out=Path(folder) / "out", speed=False, vllm=False)
        stages = {stage.name: stage.cpu_seconds for stage in compile_model(request).stages}
    tokens = samples * request.recipe.calibration.tokens
    known = {"model": model, "recipe": recipe, "tokens": tokens, "original": spent, "quantize": stages["quantize"]}
    return known | {"all": sum(stages.values()), "block_bytes": max(held), "bytes": sum(held)}


def main() -> None:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipe", default="int4-best")
    parser.add_argument("--samples", type=int, default=8)
    asked = parser.parse_args()
    rows = [row(asked.model, asked.recipe, asked.samples)]
    show("the original beside the quantized model", rows, COLUMNS)
    record("original_stream", "no claim: cost of the original's forward, and its size on disk", rows, vars(asked))


if __name__ == "__main__":
    main()
