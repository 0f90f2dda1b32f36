"""Whether TensorRT-RTX 1.4.0, which refuses no Hopper in words, builds an engine of one product here, and runs it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

# rows of x, columns, rows of the weight
_M, _K, _N = 16, 4096, 4096
# of float16 results, relative to the largest
_NEAR = 2.0**-8


def tried(at: str) -> dict[str, Any]:
    """Return `{"version", "capability", "built", "ran", "worst", "ok", "said"}`; `said`: the library's errors.

    Args:
        at: `cuda`; on `cpu` an engine is built for SM 8.9 and not run: no list of architectures has 9.0.
    """
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                said.append(text)

    log = Log()
    found: dict[str, Any] = {"version": trt.__version__, "built": False, "ran": False, "worst": None, "ok": False}
    sm = torch.cuda.get_device_capability() if at == "cuda" else (8, 9)
    found |= {"capability": f"{sm[0]}.{sm[1]}", "said": said}
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    w = torch.randn(_K, _N, generator=torch.Generator().manual_seed(0)).half() / 64
    x = network.add_input("x", trt.float16, (_M, _K))
    held = w.numpy()
    matrix = network.add_constant((_K, _N), trt.Weights(held)).get_output(0)
    product = network.add_matrix_multiply(x, trt.MatrixOperation.NONE, matrix, trt.MatrixOperation.NONE)
    product.get_output(0).name = "y"
    network.mark_output(product.get_output(0))
    config = builder.create_builder_config()
    if at != "cuda":
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    found["built"] = engine is not None
    if engine is None or at != "cuda":
        return found
    loaded = trt.Runtime(log).deserialize_cuda_engine(engine)
    context = loaded.create_execution_context() if loaded else None
    if context is None:
        return found
    given = torch.randn(_M, _K, device=at).half()
    y = torch.empty(_M, _N, dtype=torch.float16, device=at)
    context.set_tensor_address("x", given.data_ptr())
    context.set_tensor_address("y", y.data_ptr())
    found["ran"] = bool(context.execute_async_v3(torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    exact = given.double() @ w.to(at).double()
    found["worst"] = float((y.double() - exact).abs().max() / exact.abs().max())
    return found | {"ok": found["ran"] and found["worst"] <= _NEAR}
