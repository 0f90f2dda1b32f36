"""Train the scales and norm gains of the finished blocks on the original's answers: the pass `recover`.

    loss     KL(original || quantized), nats a token, mean of a batch's tokens
    trained  d of each scale and gain, which becomes scale (1 + d), gain + d mean|gain|;  Adam (Kingma and Ba, 2015)

A batch goes forward block by block, and backward from the last block: a block runs again with gradients, so one is in
memory at a time. Quantized weights are their values times (1 + d), so formats need no derivative. Inputs that a runtime
quantizes are taken as they are.

Every few steps the held sequences are scored with scales as they are stored. The best state so far is committed with
the optimizer's, and a resume goes on from there. The best is kept if it is better than the beginning by more than
chance (Student's t of the sequences' differences, one-sided 97.5 %).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.formats.base import layout
from quantkit.model import finished
from quantkit.model.source.weights import write_tensors
from quantkit.model.streaming.answers import PULLED, Answers, Head
from quantkit.model.structure.traced import is_transposed
from quantkit.passes import ANSWERS, NOTE, decision
from quantkit.pipeline.blocks.flips import flip
from quantkit.planning.compiling import WHOLE
from quantkit.stats.clustered import gained

if TYPE_CHECKING:
    from quantkit.bundle import Build
    from quantkit.exporters.values import Values
    from quantkit.pipeline.blocks.prepared import Prepared
    from quantkit.pipeline.progress import Progress

# decision: training gained nothing that the held sequences show
UNGAINED = "recover-without-gain"
# steps of growing size; steps between two scores of the held sequences; scores without a better one that end it
_GROWING, _EVERY, _PATIENCE = 3, 8, 3


@dataclass(frozen=True)
class Trainable:
    """A block that runs with leaves in place of parameters: by their names in it, those and what they were made of."""

    module: nn.Module
    scaled: dict[str, Tensor]
    leaves: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return functional_call(self.module, self.leaves, args, kwargs)


class Student:
    """A finished model of which scales and norm gains are trained on the answers of the original.

    Args:
        values: the finished model.
        original: the original's answers for ids [samples, tokens].
        ids: the same ids.
        half: whether products are computed in bfloat16.

    Attributes:
        trained: linear, or name of a norm gain -> d, in the shape of its scale or gain.
    """

    def __init__(self, values: Values, original: Answers, ids: Tensor, *, half: bool) -> None:
        self.values, self.stream, self._original, self._half = values, values.stream, original, half
        self._ids = ids.to(self.stream.device)
        self.tokens = ids.shape[1]
        self._calls, self._kept = self.stream.begin(ids, 1), dict[int, nn.Module]()
        self.stages = list(enumerate(self.stream.visits))
        size = 4 * sum(value.numel() for block in self.stream.blocks for value in block.parameters())
        self._keeps = size <= WHOLE and self.stream.device.type == "cpu"
        self._scales = {
            name: values.quantized(name, codes=False).scale.to(self.stream.device)
            for name in values.schemes
            if name != self.stream.head
        }
        shapes = {name: scale.shape for name, scale in self._scales.items()}
        shapes |= {
            name: self.stream.skeleton.get_parameter(name).shape for name in self.stream.files if self._is_gain(name)
        }
        self.trained = {
            name: torch.zeros(shape, device=self.stream.device, requires_grad=True) for name, shape in shapes.items()
        }
        self._rest = self.stream.rest()
        self._gains = {
            name: self.stream.value(self._rest, name).clone()
            for name in self.stream.rest_names()
            if name in self.trained
        }
        self._head = Head(self._rest, self.stream.paths, self.stream.flow, self.stream.runs(self._rest))

    def _is_gain(self, name: str) -> bool:
        """Tell whether a parameter is a norm's gain: a weight of one dimension."""
        try:
            parameter = self.stream.skeleton.get_parameter(name)
        except AttributeError:  # a buffer
            return False
        return name.endswith(".weight") and parameter.dim() == 1 and parameter.is_floating_point()

    def scale(self, linear: str) -> Tensor:
        """Return a linear's trained scale as it is stored."""
        before = self._scales[linear]
        return (before.float() * (1 + self.trained[linear].detach())).to(before.dtype)

    def gain(self, name: str, before: Tensor, *, stored: bool) -> Tensor:
        """Return a trained gain, from its value before; rounded as in files if it is `stored`."""
        gain = before.float() + self.trained[name] * before.float().abs().mean()
        return gain.detach().to(getattr(torch, self.stream.source.dtype)).float() if stored else gain

    def _weight(self, linear: str, before: Tensor, *, stored: bool) -> Tensor:
        """Return a trained weight, from its values before, in the same layout."""
        scheme, scale = self.values.schemes[linear], self._scales[linear].float()
        factor = 1 + self.trained[linear]
        if stored:
            factor = torch.where(scale == 0, 1.0, self.scale(linear).float() / scale)
        turned = is_transposed(self.stream.skeleton.get_submodule(linear))
        matrix = before.T if turned else before
        columns = matrix.shape[1]
        matrix = nn.functional.pad(matrix, (0, scheme.padding(columns)))
        parts = layout.split(matrix, scheme) * layout.against(factor, (matrix.shape[0], matrix.shape[1]), scheme)
        matrix = parts.reshape(matrix.shape)[:, :columns]
        return matrix.T if turned else matrix

    def block(self, index: int, *, stored: bool = False) -> Trainable:
        """Load a block with its trained parameters, as leaves of their own unless as they are `stored`."""
        module = self._kept.get(index) or self.stream.load(index)
        if self._keeps:
            self._kept[index] = module
        prefix, scaled = f"{self.stream.block_names[index]}.", dict[str, Tensor]()
        for name, before in module.named_parameters():
            full = prefix + name
            if full in self.trained:
                scaled[name] = self.gain(full, before.detach(), stored=stored)
            elif (linear := full.removesuffix(".weight")) in self.trained:
                scaled[name] = self._weight(linear, before.detach(), stored=stored)
        narrow = torch.bfloat16 if self._half else torch.float32
        leaves = {
            name: value.detach().to(narrow if value.dim() > 1 else torch.float32).requires_grad_(not stored)
            for name, value in scaled.items()
        }
        return Trainable(module, scaled, leaves)

    def states(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the hidden states before the first block, each [1, tokens, width]."""
        return [self._calls.hidden[row : row + 1] for row in rows]

    def forward(
        self,
        rows: Sequence[int],
        hidden: list[Tensor],
        stages: Iterable[tuple[int, int]],
        *,
        stored: bool = True,
        note: Callable[[list[Tensor]], object] = lambda _: None,
    ) -> list[Tensor]:
        """Pass hidden states of some sequences through stages, each with its block; `note` is given those before."""
        for stage, index in stages:
            note(hidden)
            hidden = self.through(self.block(index, stored=stored), stage, hidden, rows)
        return hidden

    @torch.no_grad()
    def through(self, run: Trainable, stage: int, hidden: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Pass hidden states of some sequences through one stage."""
        with self._narrow():
            return [self._row(run, stage, one, row).to(one) for one, row in zip(hidden, rows, strict=True)]

    def _row(self, run: Trainable, stage: int, hidden: Tensor, row: int) -> Tensor:
        return self._calls.pass_on(stage, self._calls.forward_row(run, stage, hidden, row))  # type: ignore[arg-type]

    def _narrow(self) -> torch.autocast:
        return torch.autocast(self.stream.device.type, torch.bfloat16, enabled=self._half)

    def _loss(self, logits: Tensor, row: int, part: slice) -> Tensor:
        """Sum KL(original || logits) over some positions of a sequence."""
        with torch.no_grad():
            original = self._original(row, part).float().log_softmax(-1)
        return nn.functional.kl_div(logits.float().log_softmax(-1), original, log_target=True, reduction="sum")

    def _settle(self, *, stored: bool) -> list[Tensor]:
        """Put trained gains outside of the blocks in place, and return them."""
        places: list[Tensor] = []
        for name, before in self._gains.items():
            place = self._rest.get_parameter(name)
            place.data.copy_(self.gain(name, before, stored=stored).detach())
            places.append(place.requires_grad_(not stored))
        return places

    def learn(self, rows: Sequence[int]) -> float:
        """Add the gradients of the loss of some sequences to those of `trained`, and return the loss."""
        inputs: list[list[Tensor]] = []
        hidden = self.forward(rows, self.states(rows), self.stages, stored=False, note=inputs.append)
        places = self._settle(stored=False)
        total, pulls, others = self.pulls(rows, hidden, places)
        for (name, before), gradient in zip(self._gains.items(), others, strict=True):
            self._add(self.gain(name, before, stored=False), gradient)
        for stage, index in reversed(self.stages):
            run = self.block(index)
            pulls, sums = self.back(run, stage, inputs.pop(), rows, pulls, list(run.leaves.values()))
            for value, gradient in zip(run.scaled.values(), sums, strict=True):
                self._add(value, gradient)
        return total

    def pulls(
        self, rows: Sequence[int], hidden: Sequence[Tensor], places: Sequence[Tensor] = ()
    ) -> tuple[float, list[Tensor], list[Tensor]]:
        """Return the loss of some sequences, its gradients by their last hidden states, and by parameters outside."""
        total, share = 0.0, 1 / (len(rows) * self.tokens)
        pulls, sums = [], [torch.zeros_like(one) for one in places]
        for one, row in zip(hidden, rows, strict=True):

            def loss(logits: Tensor, part: slice, row: int = row) -> Tensor:
                nonlocal total
                value = self._loss(logits, row, part) * share
                total += float(value.detach())
                return value

            with self._narrow():
                pull, *others = Answers(self._head, self._ids[row : row + 1], one).pull(0, loss, places)
            pulls.append(pull)
            for sum_, other in zip(sums, others, strict=True):
                sum_.add_(other)
        return total, pulls, sums

    def back(
        self,
        run: Trainable,
        stage: int,
        hidden: Sequence[Tensor],
        rows: Sequence[int],
        pulls: Sequence[Tensor],
        leaves: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients by a stage's hidden states, and the sums of those by leaves, float32."""
        sums, before = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves], []
        for one, row, pull in zip(hidden, rows, pulls, strict=True):
            start = one.detach().requires_grad_(True)
            with torch.enable_grad(), self._narrow():
                end = self._row(run, stage, start, row)
            how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            first, *gradients = torch.autograd.grad(end, [start, *leaves], pull.to(end), **how)
            before.append(first)
            for sum_, gradient in zip(sums, gradients, strict=True):
                sum_.add_(gradient)
        return before, sums

    def stored(self) -> dict[str, Tensor]:
        """Return trained scales and gains by the names of stored results, in their stored dtypes."""
        dtype = getattr(torch, self.stream.source.dtype)
        gains = {
            name: self.gain(name, self.stream.tensor(name), stored=True).to("cpu", dtype)
            for name in self.trained
            if name not in self._scales
        }
        return gains | {finished.scale_key(name): self.scale(name).cpu() for name in self._scales}

    @staticmethod
    def _add(value: Tensor, gradient: Tensor) -> None:
        """Pass a gradient on to what a trained value was made of."""
        torch.autograd.backward(value, gradient.to(value))

    def score(self, rows: Sequence[int]) -> list[float]:
        """Return the loss of some sequences, nats a token, with everything as it is stored."""
        hidden = self.forward(rows, self.states(rows), self.stages)
        self._settle(stored=True)
        return self.losses(rows, hidden)

    @torch.no_grad()
    def losses(self, rows: Sequence[int], hidden: Sequence[Tensor]) -> list[float]:
        """Return the loss of some sequences, nats a token, from their last hidden states."""
        losses = []
        for one, row in zip(hidden, rows, strict=True):
            answers, tokens = Answers(self._head, self._ids[row : row + 1], one), self.tokens
            with self._narrow():
                parts = [slice(start, min(start + PULLED, tokens)) for start in range(0, tokens, PULLED)]
                losses.append(sum(float(self._loss(answers(0, part), row, part)) for part in parts) / tokens)
        return losses


def recover(prepared: Prepared, build: Build, progress: Progress) -> None:
    """Train scales and gains as the recipe asks, and commit them once."""
    step = next(step for step in prepared.steps if ANSWERS in step.needs)
    if _DONE in build.done():
        return
    assert prepared.training is not None
    name, settings, ids = step.run.name, step.settings, prepared.training.ids
    progress.at("train", 0.0, f"{name}: the original's answers")
    answers = prepared.stream.answers(ids)

    def student() -> Student:
        return Student(prepared.values(build), answers, ids, half=_halves(prepared))

    if settings.flips:
        flip(prepared, build, progress, settings, student)
    begun, model = time.process_time(), student()
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
        taken = decision(name, UNGAINED, "scales and norm gains", f"{kl} is no more than chance: kept as they were")
    record |= {"decisions": [taken.as_dict()], "cpu_seconds": time.process_time() - begun}
    build.commit(_DONE, record, files, hashes=hashes)


_DONE, _STATE = "recovered", "recovering-"
# parts of a state: d, Adam's two moments, the best d
_PARTS = ("d", "exp_avg", "exp_avg_sq", "best")


def _halves(prepared: Prepared) -> bool:
    """Tell whether products in bfloat16 are faster: on a GPU, and on processors with instructions for them."""
    if not prepared.device.is_cpu:
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


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
