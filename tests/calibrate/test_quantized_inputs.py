"""Statistics of quantized inputs, fixed scales found on the way, and the cache: paused and replayed alike."""

import inspect
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

from quantkit.calibrate.statistics.collected import Stats
from quantkit.calibrate.statistics.scales import Scales
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.formats.base import activation
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.streaming.transforms import attach_cache, attach_inputs
from quantkit.model.structure.traced import SharedInput, trace
from quantkit.scheme import ActivationScheme, CacheScheme

STATIC = ActivationScheme(format="int8", granularity="tensor", dynamic=False)
CACHE = CacheScheme(format="int8")


def stats(chunk: int, scheme: ActivationScheme | None, cache: CacheScheme | None = None, name: str = "llama") -> Stats:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(5, 12), chunk)
    module = loaded.load(0)
    structure = trace(module, lambda: calls.run(module, 0, calls.hidden[:chunk]))
    hooks = attach_inputs(module, dict.fromkeys(structure.linears, scheme) if scheme else {})
    hook = attach_cache(module, cache) if cache is not None else None
    return Stats(module, structure.groups, calls, 0, calls.hidden, scales=Scales(hooks, hook))


def assigned(found: Stats) -> dict[str, InputStats]:
    """A staged run in which every linear of a group counts as assigned once it was visited."""
    kept: dict[str, InputStats] = {}

    def visit(group: SharedInput, seen: InputStats) -> None:
        kept[group.name] = seen
        for name in group.members:
            if name in found.scales.inputs:
                found.scales.inputs[name].on = True

    found.staged(visit, quantized=True)
    return kept


@pytest.mark.parametrize("scheme", [STATIC, ActivationScheme(format="int8")])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_hessian_is_of_what_the_kernels_multiply(scheme: ActivationScheme, name: str) -> None:
    results: dict[int, dict[str, InputStats]] = {}
    for chunk in (5, 2):
        found = stats(chunk, scheme, name=name)
        raw: dict[str, list[Tensor]] = {group.name: [] for group in found.groups}
        results[chunk] = assigned(found)
        hooks = [
            found.module.get_submodule(key).register_forward_pre_hook(
                lambda _, args, kept=kept: kept.append(args[0].reshape(-1, args[0].shape[-1])), prepend=True
            )
            for key, kept in raw.items()
        ]
        whole = found.calls.run_all(found.module, 0, found.hidden)
        for hook in hooks:
            hook.remove()
        assert found.outputs is not None
        assert torch.allclose(found.settled(), whole, atol=1e-5)
        for key, parts in raw.items():
            seen = activation.fake_quantize(torch.cat(parts), scheme, found.scales.inputs[key].static)
            expected = seen.T @ seen / seen.shape[0]
            assert torch.allclose(results[chunk][key].hessian, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    for key, one in results[5].items():
        top = float(one.hessian.max())
        assert torch.allclose(one.hessian, results[2][key].hessian, atol=1e-3 * top)


@pytest.mark.parametrize("chunk", [5, 2])
def test_one_fixed_scale_a_shared_input_from_all_that_was_seen(chunk: int) -> None:
    found = stats(chunk, STATIC)
    # nothing assigns codes stage by stage: as after rounding to nearest
    for hook in found.scales.inputs.values():
        hook.on = True
    first = found.groups[0]
    plain = LoadedModel(zoo.tiny("llama"))
    with torch.no_grad():
        normed = plain.load(0).get_submodule("input_layernorm")(found.hidden)
    found.settled()
    for name in first.members:
        static = found.scales.inputs[name].static
        assert static is not None
        assert float(static.scale) == pytest.approx(float(normed.abs().max()) / 127.5, rel=1e-6)
    for group in found.groups:
        assert len({float(found.scales.inputs[name].static.scale) for name in group.members}) == 1  # type: ignore[union-attr]
    assert not any(hook.waits for hook in found.scales.inputs.values())


def test_other_passes_see_inputs_as_they_are() -> None:
    found = stats(5, STATIC, CACHE)
    seen: dict[str, Tensor] = {}
    found.staged(lambda group, stats: seen.__setitem__(group.name, stats.hessian))
    plain: dict[str, Tensor] = {}
    stats(5, None).staged(lambda group, stats: plain.__setitem__(group.name, stats.hessian))
    assert all(torch.equal(seen[name], plain[name]) for name in plain)
    assert found.scales.inputs["self_attn.q_proj"].waits and found.scales.cache is not None and found.scales.cache.waits


def reference_attention(module: Any, hidden: Tensor, calls: Any, change: Any) -> Tensor:
    """The block with a cache of transformers' own whose entries are changed before attention reads them."""
    from transformers import DynamicCache

    class Changed(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return super().update(change(keys), change(values), *args, **kwargs)  # type: ignore[no-any-return]

    call = calls.call(0)
    bound = inspect.signature(module.forward).bind(hidden, *call.rest.args, **call.rest.kwargs)
    bound.arguments["past_key_values"] = Changed()
    output = module(*bound.args, **bound.kwargs)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel", "token"])
@pytest.mark.parametrize("chunk", [5, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_cache_stores_what_its_format_holds(granularity: str, chunk: int, name: str) -> None:
    scheme = CacheScheme.model_validate({"format": "int8", "granularity": granularity})
    found = stats(chunk, None, scheme, name)
    outputs = found.settled()
    assert not torch.equal(outputs, stats(chunk, None, None, name).settled())
    assert found.scales.cache is not None and not found.scales.cache.waits

    # the oracle: scales over all five sequences, by hand
    over = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "channel": (0, 2), "token": (3,)}[granularity]

    def change(states: Tensor) -> Tensor:
        scale = states.abs().amax(dim=over, keepdim=True) / 127.5
        return (states / scale).clamp(-128, 127).round() * scale

    plain = LoadedModel(zoo.tiny(name))
    calls = plain.begin(zoo.ids(5, 12), 5)
    with torch.no_grad():
        expected = reference_attention(plain.load(0), calls.hidden, calls, change)
    assert torch.allclose(outputs, expected, atol=2e-4 * float(expected.abs().max()))


def test_the_hook_hands_on_to_the_cache_that_was_there() -> None:
    """Generation goes on working: what lies in the real cache is what was quantized."""
    model, ids = zoo.tiny("llama"), zoo.ids(1, 8)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=True)
    for block in model.model.layers:  # type: ignore[union-attr]
        attach_cache(block, CacheScheme(format="int8", granularity="token")).on = True
    with torch.no_grad():
        first = model(input_ids=ids[:, :7], use_cache=True)
        second = model(input_ids=ids[:, 7:], past_key_values=first.past_key_values, use_cache=True)
        whole = model(input_ids=ids, use_cache=False)
    error = float((plain.logits - whole.logits).abs().max())
    # sums in another order move a code now and then
    assert float((second.logits[:, -1] - whole.logits[:, -1]).abs().max()) < error / 10
    assert first.past_key_values.get_seq_length() == 8
