"""Token ids and logits that llama.cpp gives on texts, of a GGUF file that it expands to 32-bit floats itself.

In an environment with llama-cpp-python.
request: {"source", "f32": where the expanded file goes, "texts": [...], "logits": where they go (npz), "every": 16}
answer:  {"ids": [[...], ...]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT, F32 = 1100, 0


def main(request: dict[str, Any]) -> dict[str, Any]:
    if not Path(request["f32"]).exists():
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype, asked.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
        if llama_cpp.llama_model_quantize(request["source"].encode(), request["f32"].encode(), asked):
            raise SystemExit("llama.cpp did not expand the file")
    model = llama_cpp.Llama(
        request["f32"], n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, type_k=F32, type_v=F32, verbose=False
    )
    ids, logits = [], []
    for text in request["texts"]:
        found = model.tokenize(text.encode(), add_bos=True, special=True)[: CONTEXT - 10]
        model.reset()
        model.eval(found)
        ids.append(found)
        logits.append(np.array(model.scores[: len(found)], np.float32)[:: request["every"]])
    np.savez(request["logits"], *logits)
    return {"ids": ids}
