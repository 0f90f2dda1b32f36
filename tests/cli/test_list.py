"""List: every kind, every summary."""

from __future__ import annotations

from typing import Any

from quantkit import registry
from quantkit.report import catalog


def test_list_shows_every_kind_with_its_summaries(quantkit: Any) -> None:
    ran = quantkit("list")
    assert all(kind in ran.out for kind in catalog.KINDS)
    found = quantkit("list", "--json").envelope["result"]
    assert list(found) == list(catalog.KINDS)
    assert found["passes"] == registry.summaries("passes")
    assert all(summary for names in found.values() for summary in names.values())
    assert list(quantkit("list", "formats", "--json").envelope["result"]) == ["formats"]
