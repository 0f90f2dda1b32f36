"""Gradients that come block by block are those of the whole model, as plain transformers gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import shrink

from quantkit.calibrate.statistics import gradients
from quantkit.errors import InputError
from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import Calls, Given
from quantkit.model.streaming.stream import StreamedModel

IDS = torch.randint(5, 60, (3, 16), generator=torch.Generator().manual_seed(3))


def streamed(folder: Path, *, half: bool) -> dict[str, Tensor]:
    """Full name of a linear -> gradients."""
    stream, seen = StreamedModel(open_model(str(folder))), dict[str, Tensor]()

    def write(index: int, found: dict[str, Tensor]) -> None:
        seen.update({f"{stream.block_names[index]}.{name}": value for name, value in found.items()})

    gradients.collect(stream, IDS, 7, write, half=half)
    return seen


def plain(folder: Path, *, half: bool) -> dict[str, Tensor]:
    """The same by one backward of the whole model a sequence, of weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator, seen = torch.Generator().manual_seed(7), dict[str, list[Tensor]]()
    for row in IDS:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and ".layers." in name:
                module._forward_hooks.clear()

                def keep(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
                    output.register_hook(lambda gradient: seen.setdefault(name, []).append(gradient[0]))

                module.register_forward_hook(keep)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(row[None], use_cache=False).logits[0].float()
        sums = logits.detach().softmax(-1).cumsum(-1)
        levels = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
        drawn = torch.searchsorted(sums, levels)[:, 0]
        nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    return {name: torch.stack(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "half"),
    [
        *(("LlamaForCausalLM", half) for half in (False, True)),
        *(("Gemma3ForCausalLM", half) for half in (False, True)),
        ("Qwen3MoeForCausalLM", False),  # rounding changes the experts of a token
    ],
)
def test_those_of_the_whole_model(name: str, half: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    shrink.tiny(name, tmp_path, dtype=dtype)
    ours, theirs = streamed(tmp_path, half=half), plain(tmp_path, half=half)
    shared = ours.keys() & theirs.keys()
    assert len(shared) == len(theirs)  # of a mixture's experts, which are no linears there, only we know
    for linear in shared:
        largest = float(theirs[linear].abs().max())
        off = float((ours[linear].float() - theirs[linear]).abs().max())
        assert off <= 2.0 ** (-5 if half else -8) * largest + 1e-7, linear
    for linear in ours.keys() - shared:
        assert ".experts." in linear and ours[linear].shape[-2] <= IDS.numel()


def test_long_gradients_count_by_their_length_alone() -> None:
    rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    rows[3] *= 1000
    rows[4] = 0
    expected = sum((torch.outer(row, row) / row.norm() for row in rows if bool(row.any())), torch.zeros(5, 5))
    assert torch.allclose(gradients.curvature(rows, "x").hessian, expected / 64, rtol=1e-4)


def test_a_forward_without_derivatives_is_refused() -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.product(hidden).to(torch.int32).float()

    calls = Calls(torch.randn(1, 3, 4), 1, [[Given()]], [Given()])
    with pytest.raises(InputError) as caught:
        gradients._through(calls, Rounded(), 0, calls.hidden, 0, torch.ones(1, 3, 4))
    assert caught.value.code == "gradients-none"
