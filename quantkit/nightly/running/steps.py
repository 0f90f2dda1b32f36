"""One step of a bundle in its runtime, loaded and ready to be repeated: what a night times.

    decoder   one new token a sequence, with 128 tokens in the cache
    encoder   a pass over 128 tokens a sequence
    graph     a pass over the first samples of its calibration set

Where a model has room for fewer tokens, as many as it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.timing.schedule import Step
from quantkit.model.structure.sizes import positions
from quantkit.pipeline.finished.against import config_of
from quantkit.pipeline.graphs.remeasure import file_of, holds_graph, is_network
from quantkit.runtimes import load_runtime

if TYPE_CHECKING:
    from quantkit.measurement.timing.shapes import Timeable

TOKENS = 128


def loaded(path: Path, runtime: str, batch: int, samples: Mapping[str, NDArray[Any]]) -> Step:
    """Load a bundle and prepare a step.

    Args:
        batch: sequences or samples at once.
        samples: of a graph, an array [n, ...] for each input; else empty.

    Raises:
        InputError: the bundle's and the runtime's; `out-of-memory`; `not-timed`, where a step would say nothing.
        MissingDependency: of the runtime.
    """
    bundle = Bundle.load(path)
    if holds_graph(bundle):
        return _graph(bundle, runtime, batch, samples)
    decodes = bundle.manifest.model.kind == "decoder"
    if runtime == "torch":
        return _in_torch(bundle, batch, decodes=decodes)
    model = load_runtime(runtime).load(bundle)
    # of an engine, what it was built for
    context = int(getattr(model, "capacity", None) or model.context)
    step: Step = _decode(model, batch, context) if decodes else model.prefill(batch, min(TOKENS, context))
    return step


def _decode(model: Timeable, batch: int, context: int) -> Step:
    return model.decode(batch, min(TOKENS, context - 1))


def _in_torch(bundle: Bundle, batch: int, *, decodes: bool) -> Step:
    import torch

    from quantkit.measurement.timing.cuda import KernelDecoder

    model = load_runtime("torch").load(bundle)
    if torch.cuda.is_available():
        model = model.to("cuda")
    config = config_of(bundle)
    context = min(TOKENS + 1, positions(config) or TOKENS + 1)
    if decodes:
        return _decode(KernelDecoder(model), batch, context)
    shape = batch, min(TOKENS, context)
    ids = torch.randint(0, config["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(model.device)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids)
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step


def _graph(bundle: Bundle, runtime: str, batch: int, samples: Mapping[str, NDArray[Any]]) -> Step:
    from quantkit.measurement.timing.speed import opened

    if is_network(bundle) or runtime != "onnxruntime" or not samples:
        raise InputError(
            "not-timed",
            where=str(bundle.path),
            value=f"a graph in {runtime}",
            rule="graphs are timed in ONNX Runtime",
            remedy="name `runtimes: [onnxruntime]`",
        )
    return opened(str(file_of(bundle)), samples, machine.cores()).prefill(batch, 1)
