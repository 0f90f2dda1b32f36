"""Two graphs with the same inputs in ONNX Runtime, run in turns on this machine: how many times as fast is one?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.measurement.timing.schedule import Step, Visit, interleave, runs_of, warm
from quantkit.runtimes.onnxruntime.open import open_graph
from quantkit.stats.abba import Comparison, compare

# turns of both: the fewest and the most; seconds after which none begins
_BLOCKS, _SECONDS = (8, 40), 3.0


def compared(
    subject: bytes, baseline: bytes, feeds: Mapping[str, NDArray[Any]], threads: int, *, seconds: float = _SECONDS
) -> Comparison:
    """How many times as fast `subject` is.

    Args:
        subject, baseline: models, whole.
        feeds: of both.
        threads: of one operator.
        seconds: about how long it takes.

    Raises:
        InputError: `onnx-unreadable`.
        MissingDependency: onnxruntime, scipy.
    """
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-trial-") as place:
        for name, model in (("subject", subject), ("baseline", baseline)):
            path = Path(place) / f"{name}.onnx"
            path.write_bytes(model)
            steps[name] = partial(open_graph(path, threads).run, None, dict(feeds))
    longest = max(warm(step) for step in steps.values())
    visit = Visit.fitting(longest, runs=runs_of(longest))
    turns = interleave(steps, blocks=_BLOCKS, seconds=seconds, generator=np.random.default_rng(0), visit=visit)
    return compare(turns.seconds["subject"], turns.seconds["baseline"])
