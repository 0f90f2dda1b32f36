"""llama.cpp's side of `gguf_peers.py`, by the interpreter of its own environment.

    {"do": "quantize", "source": a float GGUF, "target", "type": "Q4_K_M", "imatrix": npz of tensor -> [K], "threads"}
        -> {"bytes", "types": {type: count}}
    {"do": "score", "reference": a float GGUF, "files": {name: GGUF}, "texts": {kind: [[ids]]}, "threads"}
        -> {name: {kind: [[KL, top-1 agreement, loss, loss of the reference] of a sequence, means over its positions]}}
    {"do": "time", "files": {name: GGUF}, "rounds", "threads"}
        -> {name: {"load", "decode", "prefill": [seconds a round]}}

Scored are all positions of a sequence, each model fed 512 tokens at once, its products as llama.cpp computes them.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as lib
import numpy as np

Json = dict[str, Any]
FEW, PROMPT, STEPS = 32, 256, 32


class Model:
    """A file, with one context."""

    def __init__(self, path: str, threads: int, room: int) -> None:
        began = time.perf_counter()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path} does not load")
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = room
        settings.n_threads = settings.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, settings)
        self.load = time.perf_counter() - began
        self.length = 0

    def clear(self, length: int = 0) -> None:
        """Forget what lies behind so many tokens."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def run(self, ids: list[int], every: bool) -> None:
        """Tokens that follow; logits of all of them, or of the last."""
        batch = lib.llama_batch_init(len(ids), 0, 1)
        for number, token in enumerate(ids):
            batch.token[number], batch.pos[number] = token, self.length + number
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, 0
            batch.logits[number] = every or number == len(ids) - 1
        batch.n_tokens = len(ids)
        if status := lib.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode: {status}")
        lib.llama_batch_free(batch)
        self.length += len(ids)

    def logits(self, start: int, stop: int) -> Any:
        """Of some positions of the last run, [P, V]."""
        rows = [lib.llama_get_logits_ith(self.context, at) for at in range(start, stop)]
        return np.stack([np.ctypeslib.as_array(row, (self.words,)) for row in rows]).astype(np.float32)

    def free(self) -> None:
        """Give its memory back."""
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def quantize(asked: Json) -> Json:
    """Of a file that is there, what it holds."""
    target, begun = Path(asked["target"]), asked["target"] + ".partial"
    if target.exists():
        return described(asked["target"])
    settings = lib.llama_model_quantize_default_params()
    settings.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{asked['type']}")
    settings.nthread = asked["threads"]
    kept: list[Any] = []
    if asked["imatrix"]:
        entry = lib.llama_cpp.llama_model_imatrix_data
        with np.load(asked["imatrix"]) as stored:
            for name in stored.files:
                values = np.ascontiguousarray(stored[name], np.float32)
                kept.append((name.encode(), values))
        entries = (entry * (len(kept) + 1))()
        for place, (name, values) in zip(entries, kept, strict=False):
            place.name, place.size = name, values.size
            place.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        settings.imatrix = ctypes.cast(entries, type(settings.imatrix))
    if status := lib.llama_model_quantize(asked["source"].encode(), begun.encode(), settings):
        raise SystemExit(f"llama_model_quantize: {status}")
    Path(begun).rename(target)
    return described(asked["target"])


def described(path: str) -> Json:
    tensors = gguf.GGUFReader(path).tensors
    bits = {each.name: int(each.n_bytes) for each in tensors}
    weights = sum(int(each.n_elements) for each in tensors if len(each.shape) > 1)
    return {
        "bytes": Path(path).stat().st_size,
        "tensors": sum(bits.values()),
        "bits": 8 * sum(int(each.n_bytes) for each in tensors if len(each.shape) > 1) / weights,
        "types": dict(Counter(each.tensor_type.name for each in tensors)),
    }


def score(asked: Json) -> Json:
    room = max(len(ids) for texts in asked["texts"].values() for ids in texts)
    models = {name: Model(path, asked["threads"], room) for name, path in asked["files"].items()}
    reference = Model(asked["reference"], asked["threads"], room)
    found: Json = {name: {kind: [] for kind in asked["texts"]} for name in models}
    for kind, texts in asked["texts"].items():
        for ids in texts:
            reference.clear()
            reference.run(ids, True)
            for name, model in models.items():
                model.clear()
                model.run(ids, True)
                sums = np.zeros(4)
                for start in range(0, len(ids) - 1, FEW):
                    stop = min(start + FEW, len(ids) - 1)
                    p = log_softmax(reference.logits(start, stop))
                    q = log_softmax(model.logits(start, stop))
                    follow = np.asarray(ids[start + 1 : stop + 1])
                    rows = np.arange(stop - start)
                    kl = (np.exp(p, dtype=np.float32) * (p - q)).sum(axis=-1, dtype=np.float64)
                    same = p.argmax(axis=-1) == q.argmax(axis=-1)
                    sums += [kl.sum(), same.sum(), -q[rows, follow].sum(), -p[rows, follow].sum()]
                found[name][kind].append((sums / (len(ids) - 1)).tolist())
    return found


def timed(asked: Json) -> Json:
    found: Json = {name: {"load": [], "decode": [], "prefill": []} for name in asked["files"]}
    ids = np.random.default_rng(0).integers(0, 32000, PROMPT).tolist()
    order = list(asked["files"])
    for number in range(asked["rounds"]):
        for name in order if number % 2 == 0 else reversed(order):
            model = Model(asked["files"][name], asked["threads"], PROMPT + STEPS + 4)
            found[name]["load"].append(model.load)
            model.run(ids, False)
            model.clear()
            began = time.perf_counter()
            model.run(ids, False)
            found[name]["prefill"].append(time.perf_counter() - began)
            model.run(ids[:2], False)
            began = time.perf_counter()
            for at in range(STEPS):
                model.run([ids[at]], False)
            found[name]["decode"].append((time.perf_counter() - began) / STEPS)
            model.free()
    return found


def main(request: Any) -> Any:
    return {"quantize": quantize, "score": score, "time": timed}[request["do"]](request)
