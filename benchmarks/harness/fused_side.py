"""Expand a bundle's weights into two dense models: as its own library does it, and fused as vLLM does it.

python fused_side.py request.json answer.json
request: {"model": MODEL, "bundle": folder, "out": folder}; writes OUT/stored and OUT/fused
answer:  {"content_sha256", "largest": of the weights' differences, over the largest weight of their linear}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from quantkit.bundle import Bundle
from quantkit.model import layouts
from quantkit.model.source.open import open_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from reference import plain_vllm_weights


def main(request: dict[str, Any]) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bundle, out = Bundle.load(request["bundle"]), Path(request["out"])
    folder = bundle.model_folder
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    layout = layouts.of(config)
    expand = layout.expansion(config, torch.float32).weight
    fused = {name: each.weight for name, each in plain_vllm_weights.held(folder).items()}
    alone = {name: expand(name, stored.__getitem__) for name in fused}
    source = open_model(request["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, local_files_only=True)
    # what is not quantized, folds may have changed
    rest = {
        name: value.float()
        for name, value in stored.items()
        if name in model.state_dict() and name.endswith("norm.weight")
    }
    for side, weights in (("stored", alone), ("fused", fused)):
        values = {**rest, **{f"{name}.weight": value for name, value in weights.items()}}
        unknown = model.load_state_dict(values, strict=False).unexpected_keys
        assert not unknown, unknown
        model.save_pretrained(out / side)
    moved = [float((fused[name] - alone[name]).abs().max() / alone[name].abs().max()) for name in fused]
    return {"content_sha256": bundle.manifest.content_sha256, "largest": max(moved)}


if __name__ == "__main__":
    asked, answered = (Path(argument) for argument in sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text()))))
