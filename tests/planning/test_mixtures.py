"""Mixtures of types against what `llama-quantize` wrote, tensor by tensor."""

import json
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import get_args

import pytest

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.planning.assigned import Assigned, assign, assign_sizes
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe
from quantkit.scheme import MIXTURES, Scheme

# types in files that llama.cpp made with an importance matrix (llama-cpp-python 0.3.36), layer by layer:
# model -> file type -> tensor -> [type, times], ...
WRITTEN = json.loads((Path(__file__).parents[1] / "reference/llama_cpp_types.json").read_text())
TENSORS = (
    {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
    | {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    | {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
)


def recipe(mixture: str, **changes: object) -> Recipe:
    data = {"summary": "", "scheme": {"mixture": mixture}, "passes": ["rtn"], "keep": ["embeddings"], **changes}
    return Recipe.from_dict(data, name="x")


def assigned(model: str, mixture: str) -> Assigned:
    return assign_sizes(recipe(mixture), configs.read(model))


@pytest.mark.parametrize(("model", "mixture"), [(model, name) for model, kinds in WRITTEN.items() for name in kinds])
def test_types_are_those_of_llama_cpp(model: str, mixture: str) -> None:
    found = assigned(model, mixture)
    wanted = {
        name: list(chain.from_iterable(repeat(kind, times) for kind, times in runs))
        for name, runs in WRITTEN[model][mixture].items()
    }
    for name, scheme in found.schemes.items():
        if name == found.head:  # of a tied one llama.cpp has the table alone
            assert scheme.format == wanted.get("output", wanted["token_embd"])[0]
            continue
        _, _, layer, rest = name.split(".", 3)
        assert scheme.format == wanted[TENSORS[rest]][int(layer)], name


def test_a_fallback_says_what_it_costs() -> None:
    """SmolLM2 has 576 features, of which 256 is no divisor."""
    found = assigned("smollm2-135m", "q4_k_m")
    fallbacks = [each for each in found.decisions if each.code == "type-fallback"]
    assert {(each.from_, each.to) for each in fallbacks} == {("q4_k", "q5_0"), ("q6_k", "q8_0")}
    assert "256 does not divide K 576: 5.5 bits a weight instead of 4.5" in fallbacks[0].reason
    assert "and 165 other layers" in fallbacks[0].where
    whole = next(each for each in found.decisions if each.code == "mixture-bits")
    assert isinstance(whole.to, float) and isinstance(whole.from_, float)
    assert 5.9 < whole.to < 6.2 and 4.9 < whole.from_ < 5.4
    assert "this q4_k_m has" in whole.reason
    assert not [each for each in assigned("smollm2-135m", "q8_0").decisions if "fallback" in each.code]


def test_an_override_wins_over_the_mixture() -> None:
    shapes = {f"model.layers.{number}.mlp.{leaf}_proj": (256, 256) for number in range(3) for leaf in ("up", "down")}
    wanted = recipe("q4_k_m", overrides=[{"match": "*.0.mlp.up_proj", "weights": {"format": "q6_k"}}])
    found = assign(wanted, shapes, "float32").schemes
    assert found["model.layers.0.mlp.up_proj"].format == "q6_k"
    assert found["model.layers.1.mlp.up_proj"].format == "q4_k"
    assert recipe("q4_k_m").scheme.weights is not None


def test_a_mixture_and_a_scheme_exclude_each_other() -> None:
    assert set(MIXTURES) == {
        each for kind in get_args(Scheme.model_fields["mixture"].annotation) for each in get_args(kind)
    }
    again = Recipe.from_dict(recipe("q3_k_m").as_dict(), name="x")
    assert again.scheme == recipe("q3_k_m").scheme
    with pytest.raises(InputError, match="leave out `weights`, or `mixture`"):
        recipe("q4_k_m", scheme={"mixture": "q4_k_m", "weights": {"format": "int4"}})
    with pytest.raises(InputError, match="mixture"):
        recipe("q4_k_xl")


def test_super_blocks_alone_are_refused_where_they_do_not_fit() -> None:
    wanted = recipe("q4_k_m", scheme={"weights": {"format": "q4_k"}})
    with pytest.raises(InputError, match=r"group 256, K 576.*--recipe int8"):
        assign(wanted, {"a.0.up": (8, 576)}, "float32")
    shrink = recipe("q4_k_m", scheme={"weights": {"format": "q4_k"}}, on_indivisible="shrink")
    with pytest.raises(InputError, match="group-indivisible"):
        assign(shrink, {"a.0.up": (8, 576)}, "float32")
    padded = recipe("q4_k_m", scheme={"weights": {"format": "q4_k"}}, on_indivisible="pad")
    decision = assign(padded, {"a.0.up": (8, 576)}, "float32").decisions[0]
    assert (decision.from_, decision.to) == (576, 768)


@pytest.mark.parametrize(
    ("model", "columns", "bits", "to"),
    [("smollm2-135m", 576, 5.5, "q5_0"), ("smollm2-135m", 48, 16.0, "float16"), ("smollm2-135m", 768, 4.5, None)],
)
def test_a_table_is_counted_as_it_is_stored(model: str, columns: int, bits: float, to: str | None) -> None:
    """In the type that stands in for the one that was asked for, which is a decision of the plan."""
    sizes = replace(configs.read(model), hidden=columns, tied=False, embeddings=1000 * columns, vocabulary=1000)
    asked = recipe("q4_k_m", export=[{"gguf": {"embedding": {"format": "q4_k"}, "floats": "float16"}}])
    found = storage(sizes, asked)
    assert found.embeddings == 1000 * columns * bits / 8
    taken = [each for each in found.decisions if each.where == "embeddings"]
    assert [each.to for each in taken] == ([to] if to else [])
    assert all(f"{bits:g} bits a weight, not 4.5" in each.reason for each in taken)
