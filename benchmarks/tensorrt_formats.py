"""What TensorRT-RTX builds: formats x compute capabilities, and whether the numbers of each are right on a CPU.

    python benchmarks/tensorrt_formats.py

A Llama of one layer (128 wide, two heads of 64) in every form that `quantkit/exporters/tensorrt/dialect.py`
writes is checked in ONNX Runtime (or onnx's reference evaluator) and built for every GPU that the library lists. The
cells `tensorrt_rtx` of `export/*.yaml` rest on what is recorded here. No GPU is needed; nothing is timed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from harness.record import parsing, record, show

from quantkit.errors import InputError
from quantkit.exporters.tensorrt import check as check_network
from quantkit.exporters.tensorrt import engine as _engine
from quantkit.exporters.tensorrt.engine import TensorrtOptions
from quantkit.exporters.tensorrt.exporter import NETWORK, write_network
from quantkit.exporters.tensorrt.profiles import inputs_of, shapes
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.formats.base.activation import InputScale
from quantkit.model.run_time import RunTime
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import is_linear
from quantkit.runtimes.tensorrt.library import load
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import Profile

PROFILES = [
    Profile(name="decode", batch=(1, 2, 4), length=(1, 1, 1), context=(1, 16, 60)),
    Profile(name="prefill", batch=(1, 1, 2), length=(1, 16, 48), context=(0, 0, 0)),
]
# form -> weights and inputs
FORMS: dict[str, tuple[dict[str, Any] | None, str | None]] = (
    {"float16": (None, None), "int8, weights by channel": ({"format": "int8", "granularity": "channel"}, None)}
    | {"int8, weights in groups of 64": ({"format": "int8", "granularity": "group", "group": 64}, None)}
    | {"int8, weights and inputs": ({"format": "int8", "granularity": "channel"}, "int8")}
    | {"int4 in groups of 16": ({"format": "int4", "granularity": "group", "group": 16, "symmetric": True}, None)}
    | {"int4 in groups of 64": ({"format": "int4", "granularity": "group", "group": 64, "symmetric": True}, None)}
    | {"int4 in groups of 128": ({"format": "int4", "granularity": "group", "group": 128, "symmetric": True}, None)}
    | {"int4 by channel": ({"format": "int4", "granularity": "channel", "symmetric": True}, None)}
    | {"fp8_e4m3, weights by channel": ({"format": "fp8_e4m3", "granularity": "channel"}, None)}
    | {"fp8_e4m3, weights in blocks of 128": ({"format": "fp8_e4m3", "granularity": "block", "group": 128}, None)}
    | {"fp8_e4m3, weights and inputs": ({"format": "fp8_e4m3", "granularity": "tensor"}, "fp8_e4m3")}
    | {"mxfp8": ({"format": "mxfp8"}, None), "nvfp4": ({"format": "nvfp4"}, None), "nf4": ({"format": "nf4"}, None)}
)


def tiny(folder: Path) -> Path:
    """A Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def values(folder: Path, weights: dict[str, Any] | None, inputs: str | None) -> Values:
    """The model with the linears of its blocks rounded to nearest."""
    import dataclasses

    import torch

    from quantkit.model.source.weights import Weights

    source = open_model(str(folder))
    stream = StreamedModel(source)
    blocks = tuple(f"{name}." for name in stream.block_names)
    linears = [
        name for name, module in stream.skeleton.named_modules() if is_linear(module) and name.startswith(blocks)
    ]
    scheme = None if weights is None else WeightScheme(**weights)
    tensors = {}
    if scheme is not None:
        form = load_format(scheme.format)
        tensors = {name: form.quantize(stream.tensor(f"{name}.weight"), scheme) for name in linears}

    class Dense(Weights):
        def read(self, name: str, device: torch.device | None = None) -> Any:
            tensor = tensors.get(name.removesuffix(".weight"))
            return super().read(name, device) if tensor is None or form is None else form.dequantize(tensor)

    dense = Dense(source.weights.entries, source.weights.folder, source.weights.shards)
    how = RunTime()
    if inputs is not None:
        given = ActivationScheme(format=inputs, granularity="tensor", dynamic=False)
        how = RunTime(dict.fromkeys(linears, given), dict.fromkeys(linears, InputScale(torch.tensor([0.05]))))
    running = StreamedModel(dataclasses.replace(source, weights=dense))
    schemes = {} if scheme is None else dict.fromkeys(linears, scheme)
    return Values(running, schemes, tensors.__getitem__, how)


def main() -> None:
    """Build everything and record what was built."""
    parsing(__doc__).parse_args()
    library = load("tensorrt_rtx")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        model = tiny(Path(place) / "model")
        for form, (weights, inputs) in FORMS.items():
            folder = Path(place) / form.replace(" ", "-").replace(",", "")
            given = values(model, weights, inputs)
            write_network(folder, given, TensorrtOptions(), PROFILES)
            checks = {check.name: check.value for check in check_network.check(folder / NETWORK, given)}
            for sm in library.capabilities():
                begun = time.perf_counter()
                job = _engine.EngineJob(
                    network=str(folder / NETWORK),
                    engine=str(folder / "x.engine"),
                    library="tensorrt_rtx",
                    sm=[sm],
                    gpu="",
                    profiles=shapes(inputs_of(folder / NETWORK), PROFILES),
                    workspace=1e9,
                    optimization_level=3,
                )
                try:
                    built: dict[str, Any] = {"bytes": _engine.build(job).bytes}
                except InputError as problem:
                    built = {"refused": problem.line()[:300]}
                seconds = round(time.perf_counter() - begun, 2)
                row = {"form": form, "sm": sm, "logits": checks["network.logits"], "seconds": seconds}
                rows.append({**row, "bytes": None, "refused": "", **built})
                print(form, sm, built, flush=True)
    show(
        "what was built",
        rows,
        {"form": "form", "sm": "SM", "logits": "logits:.2g", "bytes": "bytes", "refused": "refused"},
    )
    settings = {"library": library.name, "version": library.version}
    record("tensorrt_formats", "the cells of TensorRT-RTX", rows, settings)


if __name__ == "__main__":
    main()
