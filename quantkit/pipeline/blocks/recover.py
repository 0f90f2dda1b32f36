"""Train the scales and norm gains of the finished blocks on the original's answers: the pass `recover`.

    loss     KL(original || quantized), nats a token, mean of a batch's tokens
    trained  d of each scale and gain, which becomes scale (1 + d), gain + d mean|gain|;  Adam (Kingma and Ba, 2015)

`student.py` has the forward and the backward. Every few steps the held
sequences are scored with scales as they are stored. The best state so far is committed with the optimizer's, and a
resume goes on from there. The best is kept if it is better than the beginning by more than chance (Student's t of the
sequences' differences, one-sided 97.5 %).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.model.device import half_pays
from quantkit.model.source.weights import write_tensors
from quantkit.passes import ANSWERS, NOTE, decision
from quantkit.pipeline.blocks.student import Student
from quantkit.stats.clustered import gained

if TYPE_CHECKING:
    from quantkit.bundle import Build
    from quantkit.pipeline.blocks.prepared import Prepared
    from quantkit.pipeline.progress import Progress

# decision: training gained nothing that the held sequences show
UNGAINED = "recover-without-gain"
# steps of growing size; steps between two scores of the held sequences; scores without a better one that end it
_GROWING, _EVERY, _PATIENCE = 3, 8, 3


def recover(prepared: Prepared, build: Build, progress: Progress) -> None:
    """Train scales and gains as the recipe asks, and commit them once."""
    step = next(step for step in prepared.steps if ANSWERS in step.needs)
    if _DONE in build.done():
        return
    assert prepared.training is not None
    name, settings, ids = step.run.name, step.settings, prepared.training.ids
    progress.at("train", 0.0, f"{name}: the original's answers")
    begun = time.process_time()
    model = Student(
        prepared.values(build), prepared.stream.answers(ids), ids, half=half_pays(prepared.stream.device.type)
    )
    held = list(range(settings.sequences, len(ids)))
    optimizer = torch.optim.Adam(model.trained.values(), lr=settings.rate)
    at, scores, best = _resumed(build, model, optimizer) or (0, [model.score(held)], _copied(model.trained))
    generator = torch.Generator().manual_seed(prepared.request.recipe.seed)
    rounds = -(-settings.steps * settings.batch // settings.sequences)
    order = torch.cat([torch.randperm(settings.sequences, generator=generator) for _ in range(rounds)]).tolist()
    while at < settings.steps and len(scores) - 1 - _least(scores) < _PATIENCE:
        size = min(1.0, (at + 1) / _GROWING) * 0.5 * (1 + math.cos(math.pi * at / settings.steps))
        optimizer.param_groups[0]["lr"] = settings.rate * size
        loss = model.learn(order[at * settings.batch : (at + 1) * settings.batch])
        optimizer.step()
        optimizer.zero_grad()
        at += 1
        progress.at("train", at / settings.steps, f"{name}: step {at} of {settings.steps}, loss {loss:.4f}")
        if at % _EVERY == 0 or at == settings.steps:
            scores.append(model.score(held))
            best = _copied(model.trained) if _least(scores) == len(scores) - 1 else best
            _keep(build, at, scores, model, optimizer, best)
    least = _least(scores)
    gain = gained(scores[0], scores[least])
    before, after = (float(np.mean(scores[place])) for place in (0, least))
    kl = f"KL of {len(held)} held sequences {before:.4f} -> {after:.4f} nats a token"
    record: dict[str, Any] = {"layers": [], "scores": scores}
    if gain > 0:
        for key, value in best.items():
            model.trained[key].data.copy_(value)
        result = build.temporary("recovered.safetensors")
        files = {result: build.steps / "recovered.safetensors"}
        hashes = {result: write_tensors(result, model.stored())}
        taken = decision(name, NOTE, "scales and norm gains", f"{kl}, after {min(at, least * _EVERY)} steps")
    else:
        files, hashes = {}, {}
        reason = f"{kl}: no gain beyond chance, so they stay as they were"
        taken = decision(name, UNGAINED, "scales and norm gains", reason)
    record |= {"decisions": [taken.as_dict()], "cpu_seconds": time.process_time() - begun}
    build.commit(_DONE, record, files, hashes=hashes)


_DONE, _STATE = "recovered", "recovering-"
# parts of a state: d, Adam's two moments, the best d
_PARTS = ("d", "exp_avg", "exp_avg_sq", "best")


def _copied(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trained.items()}


def _least(scores: Sequence[Sequence[float]]) -> int:
    """Return the number of the best score; the first of equals."""
    return int(np.argmin([np.mean(losses) for losses in scores]))


def _keep(
    build: Build,
    at: int,
    scores: Sequence[Sequence[float]],
    model: Student,
    optimizer: torch.optim.Adam,
    best: Mapping[str, Tensor],
) -> None:
    """Commit the state behind a step, in place of the one before."""
    states = dict[str, Tensor]()
    for name, value in model.trained.items():
        moments = optimizer.state[value]
        parts = (value.detach(), moments["exp_avg"], moments["exp_avg_sq"], best[name])
        states |= {f"{part}/{name}": tensor for part, tensor in zip(_PARTS, parts, strict=True)}
    place = build.temporary("recovering.safetensors")
    before = [build.steps / f"{key}.safetensors" for key in build.done() if key.startswith(_STATE)]
    key = f"{_STATE}{at:06}"
    hashes = {place: write_tensors(place, states)}
    files = {place: build.steps / f"{key}.safetensors"}
    build.commit(
        key, {"step": at, "scores": scores}, files, remove=[one for one in before if one.exists()], hashes=hashes
    )


def _resumed(
    build: Build, model: Student, optimizer: torch.optim.Adam
) -> tuple[int, list[list[float]], dict[str, Tensor]] | None:
    """Return the committed step, its scores and the best d, with the state put back; None without any."""
    key = max((key for key in build.done() if key.startswith(_STATE)), default=None)
    if key is None:
        return None
    record, states = build.done()[key], load_file(build.steps / f"{key}.safetensors")
    best = {}
    for name, value in model.trained.items():
        d, first, second, best[name] = (states[f"{part}/{name}"].to(value) for part in _PARTS)
        value.data.copy_(d)
        optimizer.state[value] = {"step": torch.tensor(float(record["step"])), "exp_avg": first, "exp_avg_sq": second}
    return record["step"], record["scores"], best
