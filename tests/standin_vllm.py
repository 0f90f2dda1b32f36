"""A stand-in for vLLM: the interface that `runtimes/vllm/inside.py` uses, over a model of one table and one head.

Logits of a token are those of the head on its embedding. Linears in int8 by channel multiply in float32, and one of
them wrongly, if `WRONG` names it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

STAND_IN = """
import os, types, torch
from safetensors.torch import load_file

class SamplingParams(types.SimpleNamespace):
    pass

class LogitsProcessor(torch.nn.Module):
    def forward(self, head, hidden):
        return hidden @ head.T

class Linear(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.output_size, self.input_size = weight.shape
        self.quant_method = self

    def apply(self, layer, x):
        return x @ self.weight.T

class LLM:
    def __init__(self, model, dtype, **settings):
        if settings.get("language_model_only"):
            raise ValueError("Model architectures ['Llava'] failed to be inspected. See the logs")
        stored = load_file(model + "/model.safetensors")
        tensors = {name: one.to(getattr(torch, dtype)) for name, one in stored.items()}
        if "lm_head.weight" not in tensors:
            raise ValueError("Model architectures ['GPT2LMHeadModel'] are not supported for now.\\nSee the docs")
        self.table, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        self.core = torch.nn.Module()
        self.core.logits_processor = LogitsProcessor()
        self.core.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
        for name in [one for one in stored if one.endswith(".gate_proj.weight") and one + "_scale" in stored]:
            weights = []
            for one in (name, name.replace(".gate_", ".up_")):
                scale = stored[one + "_scale"].float()
                if os.environ.get("WRONG") == one:
                    scale[3] *= 2
                weights.append(stored[one].float() * scale)
            inner, path = self.core, name.replace(".gate_proj.weight", ".gate_up_proj").split(".")
            for part in path[:-1]:
                if not hasattr(inner, part):
                    inner.add_module(part, torch.nn.Module())
                inner = getattr(inner, part)
            inner.add_module(path[-1], Linear(torch.cat(weights).to(getattr(torch, dtype))))
        config = types.SimpleNamespace(dtype=self.table.dtype, quantization=None)
        cache = types.SimpleNamespace(cache_dtype="auto", num_gpu_blocks=7, block_size=16)
        self.llm_engine = types.SimpleNamespace(
            vllm_config=types.SimpleNamespace(model_config=config, cache_config=cache))

    def apply_model(self, work):
        return [work(self.core)]

    def generate(self, prompts, params, use_tqdm):
        ids, new = list(prompts[0]["prompt_token_ids"]), []
        for _ in range(params.max_tokens):
            last = self.table[[(ids + new)[-1]]]
            new.append(int(self.core.logits_processor(self.head, last).argmax()))
        self.core.logits_processor(self.head, self.table[ids[:-1]])
        output = types.SimpleNamespace(token_ids=new)
        return [types.SimpleNamespace(outputs=[output])]
"""


def python(place: Path, version: str, source: str = STAND_IN) -> Path:
    """Write a Python in which vLLM of some version is installed."""
    packages = place / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text(source)
    if version:
        (packages / f"vllm-{version}.dist-info").mkdir()
        (packages / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    other = place / "python"
    lines = f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, {str(packages)!r})\n"
    other.write_text(f"{lines}runpy.run_path(sys.argv[-1], run_name='__main__')\n")
    other.chmod(0o755)
    return other


def stood_in(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return what the stand-in computes from ids [...] of a folder: logits [..., V], in bfloat16."""
    tensors = load_file(folder / "model.safetensors")
    table, head = (tensors[name].bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return (table[ids] @ head.T).float()
