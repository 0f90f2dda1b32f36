"""llm-compressor on given token ids, run by the interpreter of its own environment; knows nothing of quantkit.

    .peers/bin/python llm_compressor.py request.json answer.json
    request: {"model": folder, "ids": jsonl of {"input_ids": [...]}, "samples": 8, "method": "gptq"|"awq",
              "out": folder, "group": 64, "symmetric": false, "threads": 2}
    answer:  {"cpu_seconds", "cpu_seconds_quantize", "wall_seconds", "versions", "patched"}

The clock runs from the call of `oneshot` to packed weights on disk; importing and loading come before it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier


def recipe(request: dict[str, Any]) -> tuple[Any, str]:
    """The modifiers, and what had to be patched."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=request["group"], symmetric=request["symmetric"]
        ),
    )
    common = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    if request["method"] == "gptq":
        return GPTQModifier(**common), ""
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    patched = ""
    if not torch.accelerator.is_available():
        # pinned memory needs an accelerator; where there is none it only ends the run
        IntermediatesCache.pin_memory = lambda self, index: None
        patched = "IntermediatesCache.pin_memory does nothing"
    return [AWQModifier(), QuantizationModifier(**common)], patched


def expand_at_load(config: Path) -> None:
    """Ask loaders to expand the weights while they load them.

    Kept packed, asymmetric checkpoints of compressed-tensors 0.19 do not load with transformers 5.23 and
    compressed-tensors 0.20 (the packed zero points are taken for mismatched shapes). The numbers are the same.
    """
    content = json.loads(config.read_text())
    content["quantization_config"]["dequantize"] = True
    config.write_text(json.dumps(content, indent=2))


def main(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    lines = Path(request["ids"]).read_text().splitlines()[: request["samples"]]
    ids = [json.loads(line)["input_ids"] for line in lines]
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    model = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"])
    modifiers, patched = recipe(request)
    cpu, wall = time.process_time(), time.perf_counter()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=modifiers,
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
    )
    quantized = time.process_time() - cpu
    model.save_pretrained(request["out"], save_compressed=True)
    spent, lasted = time.process_time() - cpu, time.perf_counter() - wall
    expand_at_load(Path(request["out"]) / "config.json")
    names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    return {
        "cpu_seconds": spent,
        "cpu_seconds_quantize": quantized,
        "wall_seconds": lasted,
        "versions": {name: importlib.metadata.version(name) for name in names},
        "patched": patched,
    }


if __name__ == "__main__":
    asked, answered = (Path(argument) for argument in sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text()))))
