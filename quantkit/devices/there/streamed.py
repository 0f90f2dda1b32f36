"""What a checkpoint in torch, or an engine, says on this device beside the float model: by the torch that is here.

Block by block, and with the very code that scores here: whole models of the sizes that engines are for would not fit in
memory twice. What goes back are the numbers of each position; rows are made of them where the job came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.devices import job as jobs
from quantkit.devices.answers import POSITIONS, ScoredStretch, dumped
from quantkit.devices.there.models import outputs, settings
from quantkit.errors import InputError
from quantkit.measurement.timing.speed import samples_of
from quantkit.runtimes import child, load_runtime
from quantkit.runtimes.torch import RUNTIME as TORCH

if TYPE_CHECKING:
    from quantkit.runtimes import Candidate

Array = NDArray[Any]
# texts of one cell
_TEXTS = 32


def score(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Cells: as of `models.score`; all of them come once both models have run."""
    work, workdir = jobs.ScoreStreamed.model_validate(data["work"]), Path(data["workdir"])
    {"decoder": _decoder, "encoder": _encoder}[work.of](work, workdir, data["cells"], caller)


def _decoder(work: jobs.ScoreStreamed, workdir: Path, done: Mapping[str, Any], caller: child.Caller) -> None:
    import torch

    from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
    from quantkit.measurement.accuracy.score import score as scored

    if work.theirs is None:
        raise InputError("job-invalid", where="theirs", value="none", rule="a decoder is held against the float model")
    ids = samples_of(str(workdir / work.data))["ids"]
    cells = {
        (sequence, start): f"scored--{sequence}-{start}"
        for sequence, tokens in enumerate(ids)
        for start in range(0, len(tokens) - 1, POSITIONS)
    }
    if all(cell in done for cell in cells.values()):
        return
    candidate = _opened(work, workdir, done, caller)
    items = scored(
        TORCH.stream(workdir / work.theirs.place),
        candidate,
        TokenSet(torch.from_numpy(ids), "scored", "eval", ids_sha256(ids)),
        lambda share: caller.at(share, f"scoring {len(ids)} sequences"),
    )
    own = {name: values for name, values in vars(items).items() if name != "sequence"}
    for (sequence, start), cell in cells.items():
        at = np.flatnonzero(items.sequence == sequence)[start : start + POSITIONS]
        if cell not in done:
            row = {name: values[at].tolist() for name, values in own.items()}
            caller.row({"cell": cell, "rows": [dumped(ScoredStretch(way="", sequence=sequence, found=row))]})


def _encoder(work: jobs.ScoreStreamed, workdir: Path, done: Mapping[str, Any], caller: child.Caller) -> None:
    from quantkit.measurement.accuracy.embed import embeddings

    data = samples_of(str(workdir / work.data))
    ids = data["ids"]
    lengths = data.get("lengths", np.full(len(ids), ids.shape[1]))
    texts = [text[:length].tolist() for text, length in zip(ids, lengths, strict=True)]
    vectors = embeddings(_opened(work, workdir, done, caller), texts, work.pooling, work.skip)
    outputs(len(texts), lambda part: {"pooled": vectors[part]}, done, caller, step=_TEXTS)


def _opened(work: jobs.ScoreStreamed, workdir: Path, done: Mapping[str, Any], caller: child.Caller) -> Candidate:
    """What is scored; of an engine the bytes that are executed are those that the job names."""
    from quantkit.measurement.accuracy.score import settings as settings_of

    candidate = load_runtime(work.runtime).open(workdir / work.ours.place, built=work.ours.built)
    settings(settings_of(candidate), done, caller)
    return candidate
