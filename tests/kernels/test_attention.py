"""Attention of a decode step, in Triton's interpreter: within rounding of float64, and as transformers' sdpa."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from thorough import beside

pytest.importorskip("triton")  # Linux alone has it
from quantkit.kernels import attention
from quantkit.kernels.attention import split_kv, splits_of
from quantkit.runtimes.torch.decode_graph import ATTENTION, DecodeGraph, attend_by_kernel

HERE = Path(__file__).parents[2] / "benchmarks/gpu"
HALF, BRAIN = torch.float16, torch.bfloat16
# batch, heads, KV heads, D, E, tokens, room, splits
CASES = [
    (1, 4, 2, 128, 128, 512, 600, 4),
    (3, 9, 3, 64, 64, 512, 515, 4),
    (1, 8, 8, 32, 32, 1, 70, 2),
    (3, 4, 2, 96, 96, 17, 130, 1),
    (1, 9, 3, 64, 64, 17, 600, 16),
    (2, 4, 2, 24, 40, 130, 140, 2),
    (1, 20, 1, 16, 16, 90, 90, 0),
    (1, 2, 1, 16, 16, 1300, 1400, 1),
]


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run on a GPU imports by its own names: its oracle is the one here."""
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_within_rounding_of_float64(case: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sequences have padding of different lengths; keys and values after the last token are NaN."""
    from parts.attending import Case, drawn, off

    *parts, seen = drawn(Case(*case), dtype, "cpu")
    y = split_kv(*parts, seen, 0.3, splits=case[-1])
    assert y.shape == (case[0], 1, case[1], case[4]) and y.dtype == dtype
    assert off(*parts, seen, 0.3, y) <= 1.0
    assert torch.equal(split_kv(*parts, seen, 0.3, splits=case[-1]), y)


def test_the_oracle_sees_a_wrong_scale_and_a_key_too_few() -> None:
    from parts.attending import Case, drawn, off

    *parts, seen = drawn(Case(*CASES[4]), HALF, "cpu")
    assert off(*parts, seen, 0.3, split_kv(*parts, seen, 0.31, splits=2)) > 1.0
    short = seen.clone()
    short[..., 16] = False
    assert off(*parts, seen, 0.3, split_kv(*parts, short, 0.3, splits=2)) > 1.0


def test_windows_and_empty_sequences_are_right() -> None:
    from parts.attending import Case, drawn, off

    query, keys, values, seen = drawn(replace(Case(*CASES[1]), batch=2), HALF, "cpu")
    seen[..., :300] = False
    seen[..., 350:400] = False
    assert off(query, keys, values, seen, 0.3, split_kv(query, keys, values, seen, 0.3, splits=4)) <= 1.0
    seen[1] = False
    for splits in (1, 4):
        y = split_kv(query, keys, values, seen, 0.3, splits=splits)
        assert torch.equal(y[1], torch.zeros_like(y[1])) and y[0].abs().min() > 0


def test_splits_fill_a_gpu_and_are_no_more_than_blocks() -> None:
    # an H200, Llama-3-8B: batches 1, 16 and 64 at contexts 512 and 4,096
    assert [splits_of(8 * batch, room, 64, 132) for batch in (1, 16, 64) for room in (768, 4352)] == [
        *(16, 32, 8, 8, 2, 2)
    ]
    assert splits_of(1, 64, 64, 132) == 1


def stepped(model: Any, ids: torch.Tensor, fuse: str = "") -> torch.Tensor:
    """Logits of a prompt of five tokens, and of every token after it."""
    graph = DecodeGraph(model, len(ids), ids.shape[1] + 2, fuse=fuse)
    logits = [graph.prefill(ids[:, :5]).clone()]
    logits += [graph.step(ids[:, place]).clone() for place in range(5, ids.shape[1])]
    return torch.stack(logits).float()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens in the caches that the kernel read."""
    seen: list[int] = []

    def noted(query: torch.Tensor, keys: torch.Tensor, *rest: Any, **words: Any) -> torch.Tensor:
        seen.append(keys.shape[2])
        return split_kv(query, keys, *rest, **words)

    monkeypatch.setattr(attention, "split_kv", noted)
    return seen


@pytest.mark.parametrize("name", beside(["llama", "gemma3"], ["llama", "qwen3", "gemma3", "mistral"]))
def test_steps_and_padded_batches_of_a_model_are_those_of_torch(name: str, calls: list[int]) -> None:
    """gemma3 and mistral have windows of 8 tokens, which the sequence leaves behind."""
    model, ids = zoo.tiny(name, num_hidden_layers=2).half(), torch.cat([zoo.ids()[:2, :7]] * 2, dim=1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def padded() -> torch.Tensor:
        answer = model.generate(input_ids=ids, attention_mask=mask, min_new_tokens=3, **settings)  # type: ignore[operator]
        return torch.stack(answer.logits)

    expected = stepped(model, ids), padded()
    assert attend_by_kernel(model) == "" and calls == []
    found = stepped(model, ids)
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    assert len(calls) == layers * (ids.shape[1] - 5), "the prompt is torch's"
    assert (found - expected[0]).norm() <= 2.0**-9 * expected[0].norm()
    assert (padded() - expected[1]).norm() <= 2.0**-9 * expected[1].norm()
    assert len(calls) > layers * (ids.shape[1] - 5)


def test_a_compiled_step_is_one_graph_with_the_kernel_in_it(calls: list[int]) -> None:
    model, ids = zoo.tiny("llama").half(), zoo.ids()[:1, :7]
    assert attend_by_kernel(model) == "" and attend_by_kernel(model) == ""
    expected = stepped(model, ids)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    calls.clear()
    assert torch.equal(stepped(model, ids, "aot_eager"), expected)
    seen = torch._dynamo.utils.counters
    assert (seen["stats"]["unique_graphs"], dict(seen["graph_break"])) == (1, {})
    assert len(calls) == 2 * model.config.num_hidden_layers  # type: ignore[union-attr, operator]


def test_what_the_kernel_does_not_take_is_torchs() -> None:
    assert attend_by_kernel(zoo.tiny("gemma2")) == "Gemma2ForCausalLM: its attention is eager"
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    assert attend_by_kernel(falcon) == "FalconForCausalLM: its code asks whether attention is sdpa"
    assert falcon.config._attn_implementation == "sdpa"
    query, cache, seen = torch.zeros(2, 66, 1, 64).half(), torch.zeros(2, 2, 5, 64).half(), torch.ones(2, 1, 1, 5) > 0
    assert attention.fits(query, cache, cache, seen)
    for others in (
        (query, cache[:, :1], cache[:, :1], seen),
        (query, cache, cache.repeat(1, 1, 1, 8)[..., :500], seen),
    ):
        assert not attention.fits(*others), "66 x 64 and 33 x 500 columns"
    assert not attention.fits(query, cache, cache, seen[:1])
    # float32, and a mask that is not of transformers' making, go the old way
    model, ids = zoo.tiny("llama"), zoo.ids()[:1, :7]
    expected = stepped(model, ids)
    attend_by_kernel(model)
    assert model.config._attn_implementation == ATTENTION  # type: ignore[union-attr]
    assert torch.equal(stepped(model, ids), expected)
