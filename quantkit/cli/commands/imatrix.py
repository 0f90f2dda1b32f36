"""`quantkit imatrix`: write an importance matrix in llama.cpp's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Adapters, Json, TrustRemoteCode


def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, as for `compile`.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file: .gguf, or .dat for older llama.cpp.")] = Path(
        "imatrix.gguf"
    ),
    calibration: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="Text: a set of `quantkit list calibrations`, or a file.")
    ] = "prose-en",
    samples: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 512,
    generated: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Share of the sequences that the model writes itself.")
    ] = 0.0,
    adapter: Adapters = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> Answer:
    """Write an importance matrix for llama-quantize or `compile`."""
    from quantkit.pipeline.imatrix import importance_of

    with showing() as progress:
        progress.begin(f"opening {model}")
        matrix = importance_of(
            model,
            out,
            calibration=calibration,
            samples=samples,
            tokens=tokens,
            generated=generated,
            trust_remote_code=trust_remote_code,
            adapters=adapter or (),
        )
    summary = f"{out}: {len(matrix.squares)} tensors, {matrix.tokens:,} tokens of {', '.join(matrix.datasets)}"
    result = {"file": str(out), "tensors": len(matrix.squares), "tokens": matrix.tokens}
    return Answer({**result, "datasets": list(matrix.datasets)}, [summary])
