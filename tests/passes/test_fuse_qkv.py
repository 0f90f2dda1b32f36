"""Linears stored as one: the same numbers, and only where somebody gains."""

import pytest
import torch
import zoo
from planted_pass import run

from quantkit.formats import QuantTensor, joined, load_format
from quantkit.passes import load_pass
from quantkit.scheme import WeightScheme

FUSE, RTN = load_pass("fuse_qkv"), load_pass("rtn")


def quantized(scheme: WeightScheme, rows: int, seed: int) -> QuantTensor:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    found: QuantTensor = load_format(scheme.format).quantize(weight, scheme)
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["channel", "group"])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_one_product_gives_what_three_gave(name: str, granularity: str, symmetric: bool) -> None:
    group = 16 if granularity == "group" else None
    scheme = WeightScheme(format=name, granularity=granularity, group=group, symmetric=symmetric)  # type: ignore[arg-type]
    parts = [quantized(scheme, rows, rows) for rows in (64, 32, 1)]
    whole = joined(parts)
    form = load_format(name)
    assert (whole.shape, whole.scheme) == ((97, 64), scheme)
    assert torch.equal(form.dequantize(whole), torch.cat([form.dequantize(part) for part in parts]))
    # bytes add up, too
    assert torch.equal(form.pack(whole.codes), torch.cat([form.pack(part.codes) for part in parts]))


def test_what_cannot_be_one_is_refused() -> None:
    four, eight = WeightScheme(format="int4"), WeightScheme(format="int8")
    with pytest.raises(ValueError, match="one scheme"):
        joined([quantized(four, 3, 0), quantized(eight, 3, 1)])
    whole = WeightScheme(format="int8", granularity="tensor")
    with pytest.raises(ValueError, match="scales for every row"):
        joined([quantized(whole, 3, 0), quantized(whole, 3, 1)])


def test_marked_where_a_destination_gains() -> None:
    blocks, outcomes = run(zoo.tiny("llama"), zoo.ids(2, 8), RTN, FUSE, fuses=True)
    for block, outcome in zip(blocks, outcomes, strict=True):
        assert outcome.changed
        assert not outcome.decisions
        assert block.fusions == [
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ]
        joined([block.tensors[name] for name in block.fusions[0]])


def test_declined_where_none_gains_or_all_is_fused_already() -> None:
    blocks, outcomes = run(zoo.tiny("llama"), zoo.ids(2, 8), RTN, FUSE)
    assert not any(block.fusions for block in blocks)
    assert [[each.code for each in outcome.decisions] for outcome in outcomes] == [["nothing-to-do"]] * 3
    assert "loads q_proj, k_proj, v_proj separately" in outcomes[0].decisions[0].reason
    _, outcomes = run(zoo.tiny("phi3"), zoo.ids(2, 8), RTN, FUSE, fuses=True)
    assert outcomes[0].decisions[0].reason == "no two quantized linears share an input"


def test_members_that_differ_stay_apart_with_a_reason() -> None:
    eight = ({"match": "*.v_proj", "weights": {"format": "int8", "granularity": "channel"}},)
    blocks, outcomes = run(
        zoo.tiny("llama"), zoo.ids(2, 8), RTN, FUSE, fuses=True, overrides=eight, keep=("*.up_proj",)
    )
    assert not any(block.fusions for block in blocks)
    (only,) = outcomes[0].decisions
    assert (only.code, only.where) == ("not-fused", "model.layers.0.self_attn.q_proj")
    assert only.reason == "its members have different schemes"
    tensor = {"format": "int8", "granularity": "tensor"}
    _, outcomes = run(zoo.tiny("llama"), zoo.ids(2, 8), RTN, FUSE, fuses=True, weights=tensor)
    assert {each.reason for each in outcomes[0].decisions} == {"rows of a tensor share scales"}
