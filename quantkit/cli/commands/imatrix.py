"""`quantkit imatrix`: how large each input of a model's linears is, as llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json, TrustRemoteCode


def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, as for `compile`.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file: .gguf, or .dat for llama.cpp of before.")] = Path(
        "imatrix.gguf"
    ),
    calibration: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="The text: a set of `quantkit list calibration`, or a file.")
    ] = "prose-en",
    samples: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 512,
    generated: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of the sequences, those that the model writes itself.")
    ] = 0.0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> Answer:
    """Write an importance matrix, which llama-quantize and `compile --imatrix` read."""
    from quantkit.pipeline.imatrix import importance_of

    with showing() as progress:
        progress.begin(f"opening {model}")
        found = importance_of(
            model,
            out,
            calibration=calibration,
            samples=samples,
            tokens=tokens,
            generated=generated,
            trust_remote_code=trust_remote_code,
        )
    said = f"{out}: {len(found.squares)} tensors, {found.tokens:,} tokens of {', '.join(found.datasets)}"
    result = {"file": str(out), "tensors": len(found.squares), "tokens": found.tokens, "datasets": list(found.datasets)}
    return Answer(result, [said])
