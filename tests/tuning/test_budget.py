"""What a budget may say."""

from __future__ import annotations

import pytest

from quantkit.errors import InputError
from quantkit.tuning.budget import Budget


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["bits=4.25"], {"bits": 4.25}),
        (["bytes=100MB"], {"bytes": 1e8}),
        (["bytes=1.5e9"], {"bytes": 1.5e9}),
        (["kl=0.05,latency=12ms"], {"kl": 0.05, "latency": 0.012}),
        (["bits=4.25", "latency=0.5 s"], {"bits": 4.25, "latency": 0.5}),
    ],
)
def test_budgets_are_read_with_their_units(texts: list[str], expected: dict[str, float]) -> None:
    found = Budget.parse(texts).as_dict()
    assert found.keys() == expected.keys()
    assert all(found[kind] == pytest.approx(value) for kind, value in expected.items())


@pytest.mark.parametrize(
    "text", ["", "4.25", "bit=4", "bits=", "bits=x", "bits=0", "bits=-1", "bits=4MB", "kl=1.2.3", "bits=4,bits=5"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError) as problem:
        Budget.parse([text])
    assert problem.value.code == "budget-invalid"
    assert "bits=4.25" in problem.value.remedy
