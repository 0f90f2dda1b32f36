"""Graphs of one decoder in ONNX Runtime, timed in turns, weighed, or scored: a process of its own.

    {"do": "time", "sides": {name: {"graph": FOLDER, "flash": bool, "own": bool}},
     "shapes": [["prefill"|"decode", batch, tokens]], "seconds": for each shape}
        -> [{"kind", "batch", "tokens", "seconds": {name: [blocks, 2, burst]}}]
    {"do": "weigh", "graph": FOLDER, "own": bool, "tokens": of a prompt; 0: one step}   -> {"peak", "before": bytes}
    {"do": "score", "model": FOLDER, "graphs": {name: [FOLDER, own]}, "ids": [[...]], "steps": [0, 8]}
        -> [{"side", "step", "kl", "kl_se", "top1", "n"}]; step: tokens fed at a time, 0: a whole sequence

All sides of a timing are sessions of one process, whose threads stop spinning after a run. What scores is plain
transformers on one side and a plain session of ONNX Runtime on the other: none of quantkit's runtime is in the way, but
for a graph with quantkit's `own` operators.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
from process import THREADS

# read by attention when its session is made
FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"
# blocks of a shape: the fewest, and the most
BLOCKS = (5, 60)


def opened(folder: str, *, flash: bool = True, own: bool = False) -> Any:
    """By quantkit's runtime, for its prompts and steps; attention as it comes, or without its flash kernel."""
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    os.environ[FLASH] = str(int(not flash))
    model = OnnxModel(Path(folder), threads=THREADS, own=own)
    del os.environ[FLASH]
    return model


def timed(request: dict[str, Any]) -> list[dict[str, Any]]:
    from quantkit.measurement.timing.schedule import Visit, interleave, warm

    models = {
        name: opened(side["graph"], flash=side["flash"], own=side["own"]) for name, side in request["sides"].items()
    }
    found = []
    for kind, batch, tokens in request["shapes"]:
        steps = {name: getattr(model, kind)(batch, tokens) for name, model in models.items()}
        longest = max(warm(step) for step in steps.values())
        generator = np.random.default_rng(tokens)
        turns = interleave(
            steps, blocks=BLOCKS, seconds=request["seconds"], generator=generator, visit=Visit.fitting(longest)
        )
        seconds = {name: times.tolist() for name, times in turns.seconds.items()}
        found.append({"kind": kind, "batch": batch, "tokens": tokens, "seconds": seconds})
    return found


def weighed(request: dict[str, Any]) -> dict[str, int]:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    from quantkit.runtimes.onnxruntime.session import OnnxModel

    before = peak()
    model = OnnxModel(Path(request["graph"]), threads=THREADS, own=request["own"])
    (model.prefill(1, request["tokens"]) if request["tokens"] else model.decode(1, 128))()
    return {"peak": peak(), "before": before}


def logits(session: Any, ids: list[int], step: int) -> Any:
    """[T, V] of a sequence, fed so many tokens at a time; all at once for 0."""
    given = {one.name: one for one in (*session.get_inputs(), *session.get_overridable_initializers())}
    outputs = [one.name for one in session.get_outputs()]
    cache = {
        name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32)
        for name, one in given.items()
        if name.startswith("past_key_values.")
    }
    parts = []
    for begin in range(0, len(ids), step or len(ids)):
        part = np.asarray([ids[begin : begin + (step or len(ids))]])
        feeds = {"input_ids": part, "attention_mask": np.ones((1, begin + part.shape[1]), np.int64), **cache}
        if "logits_to_keep" in given:
            feeds["logits_to_keep"] = np.zeros(1, np.int64)
        made = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        parts.append(made["logits"][0])
        cache = {name: made[name.replace("past_key_values", "present")] for name in cache}
    return np.concatenate(parts)


def scored(request: dict[str, Any]) -> list[dict[str, Any]]:
    import onnxruntime
    import torch
    from score import load

    from quantkit.measurement.accuracy.positions import Accuracy

    original = load(request["model"])
    with torch.no_grad():
        expected = [original(torch.tensor([row])).logits[0].float() for row in request["ids"]]
    del original
    found = []
    for name, (folder, own) in request["graphs"].items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.log_severity_level = 3
        graph, where = str(Path(folder) / "model.onnx"), ["CPUExecutionProvider"]
        session = opened(folder, own=True).session if own else onnxruntime.InferenceSession(graph, options, where)
        for step in request["steps"]:
            accuracy = Accuracy()
            for row, before in zip(request["ids"], expected, strict=True):
                accuracy.add(torch.tensor(row), before, torch.from_numpy(logits(session, row, step)))
            items = accuracy.items()
            kl = items.mean(items.kl)
            top1 = items.mean(items.agree).value
            found.append(
                {"side": name, "step": step, "kl": kl.value, "kl_se": kl.standard_error, "top1": top1, "n": items.n}
            )
    return found


def main(request: Any) -> Any:
    return {"time": timed, "weigh": weighed, "score": scored}[request["do"]](request)
