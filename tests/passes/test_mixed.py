"""The pass `mixed` is of graphs: a transformer's block is left as it is, with the way to mix its formats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quantkit.passes import load_pass

MIXED = load_pass("mixed")


def test_a_transformers_block_is_declined() -> None:
    block: Any = SimpleNamespace(name="model.layers.0")
    outcome = MIXED.run(block, None, MIXED.Settings())
    assert not outcome.changed
    (decision,) = outcome.decisions
    assert (decision.code, decision.where) == ("nothing-to-do", "model.layers.0")
    assert "quantkit tune" in decision.reason
