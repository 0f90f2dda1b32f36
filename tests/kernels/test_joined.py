"""Linears with one input as one product have the bits of the members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # Linux alone has it
from kernel_tools import quantized

from quantkit.kernels.dispatch import OURS, Choice, Config, Table
from quantkit.kernels.layout import PackedWeight, pack
from quantkit.kernels.linear import QuantLinear
from quantkit.kernels.modules import JoinedMember, JoinedProduct, apart_by, joined

K, ROWS = 128, (48, 16, 32)
GROUPS = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False}
CHANNELS = {"format": "int8", "granularity": "channel"}


def layer(weight: PackedWeight, bias: torch.Tensor | None = None) -> QuantLinear:
    native = weight.kind.endswith(".native")
    config = Config(64, 16, 2 if native else 1, 2, 4, 2).as_dict()
    return QuantLinear(weight, bias, table=Table({weight.shape: (Choice(8, OURS, config, 1.0, 1),)}))


def members(native: bool = False, **scheme: Any) -> list[PackedWeight]:
    return [pack(quantized(rows, K, seed=rows, **scheme), native=native) for rows in ROWS]


@pytest.mark.parametrize(("native", "scheme"), [(False, GROUPS), (False, CHANNELS), (True, CHANNELS)])
def test_each_member_gets_its_own_numbers(native: bool, scheme: dict[str, Any]) -> None:
    weights = members(native, **scheme)
    biases = [torch.arange(rows).half() if rows != 16 else None for rows in ROWS]
    whole = JoinedProduct(layer(joined(weights)), ROWS)
    parts = [JoinedMember(whole, place, bias) for place, bias in enumerate(biases)]
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(0)).half()
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        assert torch.equal(part(x), layer(weight, bias)(x))


def test_all_members_share_one_product_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, products = members(**GROUPS), []
    whole = JoinedProduct(layer(joined(weights)), ROWS)
    q, k, v = (JoinedMember(whole, place) for place in range(3))
    forward: Callable[..., torch.Tensor] = whole.linear.forward
    monkeypatch.setattr(whole.linear, "forward", lambda x: products.append(len(x)) or forward(x))
    x, other = torch.ones(1, K).half(), torch.full((2, K), 2.0).half()
    first = [q(x), k(x), v(x)]
    assert products == [1]
    assert (whole._x, whole._left) == (None, {}), "nothing stays in memory"
    # a value of another call is never taken, even where a tensor is written anew
    x.fill_(2.0)
    assert torch.equal(q(x), k(other)[:1]) is False
    assert torch.equal(k(other)[:1], 2 * first[1])
    assert torch.equal(q(x), 2 * first[0])
    q(x)
    x.fill_(1.0)
    assert torch.equal(q(x), first[0])


def test_what_differs_is_named() -> None:
    whole = members(**GROUPS)[0]
    for changes, what in (
        ({"group": 32}, "a group"),
        ({"symmetric": True}, "zero points"),
        ({"format": "int8", "granularity": "channel", "group": None, "symmetric": True}, "a format"),
    ):
        other = pack(
            quantized(16, K, **{name: part for name, part in {**GROUPS, **changes}.items() if part is not None})
        )
        assert apart_by(other, whole).endswith(f"joined weights have {what} in common")
    assert "multiple of 16" in apart_by(pack(quantized(24, K, **GROUPS)), whole)
    assert apart_by(members(**GROUPS)[1], whole) == ""
