"""Logits of a checkpoint as plain transformers loads it, in an environment without quantkit.

    python benchmarks/harness/load_side.py FOLDER IDS.json LOGITS.npy

Prints the class of the first quantized layer, and versions, as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path


def main() -> int:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    folder, ids, out = sys.argv[1:]
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    wrong = {kind: sorted(info[kind])[:3] for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    with torch.no_grad():
        logits = model.eval()(torch.tensor(json.loads(Path(ids).read_text()))).logits.float().numpy()
    np.save(out, logits)
    names = ("torch", "transformers", "optimum", "gptqmodel")
    layer = next(module for name, module in model.named_modules() if name.endswith("up_proj"))
    print(
        json.dumps(
            {
                "kernel": type(layer).__name__,
                "wrong": wrong,
                "versions": {name: importlib.metadata.version(name) for name in names},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
