"""The curve of mixed precision: every point of it, the choice, the gate, and the layers behind it."""

from __future__ import annotations

from typing import Any

import pytest
from plotly import graph_objects
from pydantic import ValidationError

from quantkit.measurement.accuracy.harm import Harm, MixedSearch
from quantkit.report.bundle.harm import mixed as sections
from quantkit.report.bundle.harm import mixed_said as said
from report import labelled
from report.shown import page

NAMES = [f"features.{i}.conv" for i in range(12)]


def mixed(**changes: Any) -> MixedSearch:
    """Twelve layers, the first of which do most of the harm; two are kept high."""
    harms = [0.4 / 2**i for i in range(12)]
    data: dict[str, Any] = {
        "what": "KL, nats an image",
        "scored": "256 images of photos (tune)",
        "layers": [{"name": name, "harm": harm, "bytes": 30_000} for name, harm in zip(NAMES, harms, strict=True)],
        "steps": [
            {
                "kept": NAMES[:i],
                "bytes": 1_200_000 + 30_000 * i,
                "harm": 0.8 / 2**i,
                "ci95": [0.7 / 2**i, 0.9 / 2**i] if i < 4 else None,
            }
            for i in range(6)
        ],
        "chosen": 2,
        "limit": 0.25,
    }
    return MixedSearch.model_validate({**data, **changes})


def test_the_curve_has_every_point_the_choice_and_the_gate() -> None:
    section = sections(mixed())[0]
    curve, alone = section.charts
    lines = {tuple(trace["x"]): trace["y"] for trace in curve.figure["data"] if trace["mode"] == "lines+markers"}
    assert lines[tuple((1_200_000 + 30_000 * i) / 1e6 for i in range(6))] == pytest.approx(
        [0.8 / 2**i for i in range(6)]
    )
    assert lines[1.26,] == [0.2]
    gate = next(trace for trace in curve.figure["data"] if trace["line"].get("dash") == "dot")
    assert gate["y"] == [0.25, 0.25]
    notes = [note["text"] for note in curve.figure["layout"]["annotations"]]
    assert {"gate 0.25", "chosen: 2 layers kept high"} <= set(notes)
    assert curve.figure["layout"]["yaxis"]["type"] == "log"
    assert alone.title == "The 6 worst of 12 layers, each alone"
    kept, rest = alone.figure["data"]
    assert kept["x"] == [0.4, 0.2, *[0.0] * 4]
    assert rest["x"][:3] == [0.0, 0.0, 0.1]
    for panel in section.charts:
        graph_objects.Figure(panel.figure)


def test_the_tables_have_all_of_it() -> None:
    curve, layers = sections(mixed())
    assert curve.table.rows[2] == ["2 (chosen)", "1.26 MB", "0.200", "0.175 to 0.225", "features.1.conv"]
    assert curve.table.rows[0][-1] == "–"
    assert len(layers.table.rows) == 12
    assert layers.table.rows[11][0] == NAMES[11]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Keeping 2 layers high brings it to 0.200, for 5.0 % more bytes."),
        ({"chosen": 0, "limit": 1.0}, "That meets the gate, so nothing was kept high."),
        ({"chosen": None, "limit": 0.001}, "No point of the curve meets the gate of 0.001."),
    ],
)
def test_what_it_says_follows_from_the_choice(changes: dict[str, Any], sentence: str) -> None:
    assert said(mixed(**changes)) == ["With nothing kept high, KL, nats an image: 0.800 at 1.20 MB.", sentence]
    assert sections(mixed(**changes))


def test_no_harm_at_all_is_drawn_on_a_straight_axis() -> None:
    steps = [{"kept": [], "bytes": 10, "harm": 0.0}]
    only = mixed(steps=steps, chosen=0, limit=None, layers=[])
    (section,) = sections(only)
    assert section.charts[0].figure["layout"]["yaxis"]["type"] == "linear"
    assert sections(None) == []


@pytest.mark.parametrize("change", [{"chosen": 6}, {"steps": []}, {"limit": float("nan")}, {"size": 3}])
def test_what_is_no_curve_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        mixed(**change)


def test_it_stands_on_the_page_and_in_the_file() -> None:
    harm = Harm(mixed=mixed())
    assert Harm.model_validate_json(harm.model_dump_json()) == harm
    text = page(labelled.classifier(), labelled.classified(), [], harm=harm)
    assert "Mixed precision" in text
    assert "256 images of photos (tune)" in text
