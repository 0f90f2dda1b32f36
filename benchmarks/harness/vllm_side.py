"""One model after another in vLLM, each in a fork of a process that has imported it: a refusal leaves nothing behind.

request: {"program": runtimes/vllm/inside.py, "environment": {...}, "jobs": [job of `logits`, ...]}
answer:  [{"model": about, "reason": "", "error": ""}, ...]

A job with `do: experts` only loads: vLLM's own loader fills the tensors of the experts, and they are written as it
holds them, `experts.safetensors`. Its choice of a kernel is answered for it; nothing is converted for a kernel or run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SECONDS = 400
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_EXPERTS = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
# module -> the function that chooses a kernel for experts, and what is answered: enumeration and member
_CHOICES = {
    f"{_EXPERTS}_wna16": ("select_wna16_moe_backend", "WNA16MoEBackend", "MARLIN"),
    f"{_EXPERTS}_w8a8_fp8": ("select_fp8_moe_backend", "Fp8MoeBackend", "CPU"),
    f"{_EXPERTS}_w8a8_int8": ("select_int8_moe_backend", "Int8MoeBackend", "CPU"),
    f"{_QUANTIZATION}.mxfp4": ("select_mxfp4_moe_backend", "Mxfp4MoeBackend", "MARLIN"),
}


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ.update(request["environment"])
    sys.path.append(str(Path(request["program"]).parent))
    import inside
    import vllm  # noqa: F401 (imported once, before the forks)

    inside.ANSWERS = Path(os.devnull).open("w")  # noqa: SIM115 (open to the end)
    return [_answer(inside, job) for job in request["jobs"]]


def _answer(inside: Any, job: dict[str, Any]) -> dict[str, Any]:
    place = Path(job["folder"])
    if not (done := place / "answer.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        if (child := os.fork()) == 0:
            _work(inside, job, done)
        _, status = os.waitpid(child, 0)
        if not done.exists():
            done.write_text(json.dumps({"reason": f"its process ended with status {status}", "error": "crash"}))
        print(place.name, done.read_text()[:300], flush=True)
    answer: dict[str, Any] = json.loads(done.read_text())
    return answer


def _work(inside: Any, job: dict[str, Any], done: Path) -> None:
    signal.alarm(SECONDS)
    answer: dict[str, Any] = {"reason": "", "error": ""}

    def say(kind: str, what: Any, share: float = 0.0) -> None:
        if kind == "row" and "model" in what:
            answer.update(what)

    try:
        if job.get("do") == "experts":
            experts(job)
        else:
            inside.logits(job, say)
    except Exception as problem:
        answer |= {"reason": inside._line(problem), "error": type(problem).__name__}
    done.write_text(json.dumps(answer))
    os._exit(0)


def experts(job: dict[str, Any]) -> None:
    """Let vLLM's loader read a checkpoint, and write the tensors of its experts."""
    import torch
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, get_model

    base_loader.process_weights_after_loading = lambda *_: None
    for name, (select, kinds, kind) in _CHOICES.items():
        module = import_module(name)
        oracle = import_module(getattr(module, select).__module__)
        member = getattr(getattr(oracle, kinds), kind)
        setattr(module, select, lambda *_, answer=member, **__: (answer, None))
        for check, answer in (("check_moe_marlin_supports_config", True), ("get_marlin_input_dtype", None)):
            if hasattr(module, check):
                setattr(module, check, lambda *_, answer=answer, **__: answer)
    torch.accelerator.empty_cache = lambda: None  # a loader outside of a worker empties a GPU's cache
    config = EngineArgs(model=job["model"], max_model_len=32, **job["settings"]).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{job['folder']}/meeting", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
    loaded = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    inside = {name: value for name, value in loaded.items() if ".w13_" in name or ".w2_" in name}
    save_file(inside, f"{job['folder']}/experts.safetensors")
