"""Gradients of a decoder's loss by the outputs of its linears: how much an error of each output changes the answers.

For small errors, the KL divergence of the answers is half the Fisher information,

    KL ~ 1/2 sum over tokens (g · d)^2,    g = gradient of -log p(y) by the outputs, d their error,

with y drawn from the model's own answers (not the text's next token: Kunstner et al., "Limitations of the empirical
Fisher approximation", 2019, arXiv 1905.12558). So outputs y = W x of a linear have the curvature E[g gᵀ] ⊗ E[x xᵀ]
(Tseng et al., "Model-Preserving Adaptive Rounding", 2025, arXiv 2505.22988).

The original model runs once forward, and backward block by block from the last one, with one block in memory; only its
hidden states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from quantkit.calibrate.statistics.sums import InputStats
from quantkit.errors import InputError
from quantkit.model.streaming.calls import Calls, Shelf
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import hooked, is_linear


def collect(
    stream: StreamedModel, ids: Tensor, seed: int, write: Callable[[int, Mapping[str, Tensor]], object], *, half: bool
) -> None:
    """Collect the gradients of all linears of the blocks, the last block first.

    Args:
        stream: a decoder whose blocks each read the output of the one before (`flow.live` is False).
        ids: [samples, tokens].
        seed: seed of the drawn answers.
        write: function of a block's number and its gradients, linear -> [samples, tokens, N] bfloat16; for an expert
            [tokens that it saw, N]. A block that is called several times is written each time.
        half: whether products are computed in bfloat16.

    Raises:
        InputError: `gradients-none`, before anything is written.
    """
    calls = stream.begin(ids, 1)
    with torch.autocast(stream.device.type, torch.bfloat16, enabled=half):
        kept, hidden = Shelf(), calls.hidden
        inputs = []
        for stage, index in enumerate(stream.visits):
            inputs.append(kept.copy(hidden))
            hidden = calls.pass_on(stage, calls.run_all(stream.load(index), stage, hidden))
        answers, generator = stream.answers_of(calls, ids, hidden), torch.Generator().manual_seed(seed)

        def surprise(logits: Tensor, _: slice) -> Tensor:
            """Sum -log p(y) of answers drawn from the logits."""
            logits = logits.float()
            sums = logits.detach().softmax(-1).cumsum(-1)
            # several times as fast as torch.multinomial; below the last sum, which rounding keeps from 1
            levels = torch.rand(len(sums), 1, generator=generator).to(sums) * sums[:, -1:]
            drawn = torch.searchsorted(sums, levels)[:, 0].clamp(max=sums.shape[1] - 1)
            return nn.functional.cross_entropy(logits, drawn, reduction="sum")

        pulls = [answers.pull(row, surprise)[0] for row in range(len(ids))]
        del answers, hidden
        for stage, index in reversed(list(enumerate(stream.visits))):
            block, seen = stream.load(index), dict[str, list[Tensor]]()
            for row, pull in enumerate(pulls):
                pulls[row], gradients = _through(calls, block, stage, inputs[stage], row, pull)
                for name, gradient in gradients.items():
                    seen.setdefault(name, []).append(gradient)
            inputs.pop()
            write(index, {name: _joined(parts) for name, parts in seen.items()})


@torch.enable_grad()
def _through(
    calls: Calls, block: nn.Module, stage: int, hidden: Tensor, row: int, pull: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of one sequence by a block's input [1, tokens, width], and by its linears' outputs [T, N].

    Raises InputError: `gradients-none`.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            outputs.setdefault(name, output)

        return hook

    linears = [(name, module) for name, module in block.named_modules() if is_linear(module)]
    start = hidden[row : row + 1].to(calls.device).detach().requires_grad_(True)
    with hooked([module.register_forward_hook(keep(name)) for name, module in linears]):
        end = calls.forward_row(block, stage, start, row)
    reached = [name for name, output in outputs.items() if output.requires_grad]
    if not end.requires_grad:
        rule = "gradients need a forward of which each step has a derivative"
        remedy = "--set gptq.gradients=0"
        raise InputError("gradients-none", type(block).__name__, "its forward has no gradient", rule, remedy)
    wanted = [start, *(outputs[name] for name in reached)]
    first, *others = torch.autograd.grad(end, wanted, pull.to(end), allow_unused=True, materialize_grads=True)
    return first, {
        name: gradient.reshape(-1, gradient.shape[-1]).to("cpu", torch.bfloat16)
        for name, gradient in zip(reached, others, strict=True)
    }


def _joined(parts: list[Tensor]) -> Tensor:
    """Stack gradients of sequences; those of an expert, which sees some tokens of each, follow one another."""
    return torch.stack(parts) if len({part.shape for part in parts}) == 1 else torch.cat(parts)


def curvature(gradients: Tensor, name: str) -> InputStats:
    """Return the sums of a linear's gradients [..., tokens, N], each divided by the root of its length.

    A few tokens have gradients a thousand times longer than the rest; squared, they alone would make up the mean.
    """
    floats = gradients.float()
    size = floats.norm(dim=-1, keepdim=True)
    return InputStats([torch.where(size > 0, floats * size.rsqrt(), 0.0)], name, moments=False)
