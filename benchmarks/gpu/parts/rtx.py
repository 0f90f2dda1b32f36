"""Whether TensorRT-RTX 1.4.0, which refuses no Hopper in words, builds an engine of one product here, and runs it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

# rows of x, columns, rows of the weight; error of float16 results, relative to the largest
_M, _K, _N, _NEAR = 16, 4096, 4096, 2.0**-8


def tried(at: str) -> dict[str, Any]:
    """Return `{"version", "capability", "built", "ran", "worst", "ok", "said"}`; `said`: the library's errors.

    Args:
        at: `cuda`; on `cpu` an engine is built for SM 8.9 and not run: no list of architectures has 9.0.
    """
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                said.append(text)

    log, sm = Log(), torch.cuda.get_device_capability() if at == "cuda" else (8, 9)
    found = {"version": trt.__version__, "capability": f"{sm[0]}.{sm[1]}", "said": said}
    found |= {"built": False, "ran": False, "worst": None, "ok": False}
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    w = torch.randn(_K, _N, generator=torch.Generator().manual_seed(0)).half() / 64
    sides = network.add_input("x", trt.float16, (_M, _K)), network.add_constant((_K, _N), w.numpy()).get_output(0)
    product = network.add_matrix_multiply(sides[0], trt.MatrixOperation.NONE, sides[1], trt.MatrixOperation.NONE)
    product.get_output(0).name = "y"
    network.mark_output(product.get_output(0))
    config = builder.create_builder_config()
    if at != "cuda":
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    found["built"] = engine is not None
    loaded = trt.Runtime(log).deserialize_cuda_engine(engine) if engine is not None and at == "cuda" else None
    if loaded is not None and (context := loaded.create_execution_context()) is not None:
        x, y = torch.randn(_M, _K, device=at).half(), torch.empty(_M, _N, dtype=torch.float16, device=at)
        for name, tensor in (("x", x), ("y", y)):
            context.set_tensor_address(name, tensor.data_ptr())
        found["ran"] = bool(context.execute_async_v3(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        exact = x.double() @ w.to(at).double()
        found["worst"] = float((y.double() - exact).abs().max() / exact.abs().max())
        found["ok"] = found["ran"] and found["worst"] <= _NEAR
    return found
