"""A check that failed ends the work."""

from __future__ import annotations

import pytest

from quantkit.bundle import Check
from quantkit.errors import GateError
from quantkit.pipeline.gates import demand


def check(name: str, value: float | None, *, ok: bool, where: str = "") -> Check:
    return Check(name=name, value=value, limit=0.5, ok=ok, where=where)


def test_the_first_that_failed_is_named() -> None:
    good = check("a", 0.1, ok=True)
    demand([good], "report it")
    with pytest.raises(GateError, match="check-failed") as caught:
        demand([good, check("b", 0.75, ok=False), check("c", None, ok=False)], "report it")
    assert (caught.value.where, caught.value.value, caught.value.rule) == ("b", "b is 0.75", "at most 0.5")
    with pytest.raises(GateError) as caught:
        demand([check("c", None, ok=False, where="layer")], "report it", of="float baseline")
    assert (caught.value.where, caught.value.value) == ("float baseline: layer", "c is not known")
