"""Labelled accuracy where people read it: on the page, on the card, on the screen; no share without its interval."""

import re

import numpy as np
import pytest
from plotly import graph_objects

from quantkit.measurement.accuracy.labelled import About, classification, retrieval
from quantkit.measurement.accuracy.outputs import outputs
from quantkit.measurement.rows import Data, Row
from quantkit.report.bundle import figures
from quantkit.report.bundle.accuracy import accuracy
from quantkit.report.bundle.document import card, document
from report import labelled
from report.shown import page, printed


def texts(section) -> list[str]:
    return [note["text"] for panel in section.charts for note in panel.figure["layout"]["annotations"]]


def test_a_classifier_has_its_answers_their_change_and_how_far_it_moved() -> None:
    right, moved = accuracy(labelled.classifier(), labelled.classified())
    assert [panel.title for panel in right.charts] == ["Right answers", "Change against the original"]
    assert [panel.title for panel in moved.charts] == ["Same class as the original"], "one export's KL is a sentence"
    assert moved.sentences == ["KL divergence from the original: 0.00410 (0.00370 to 0.00450)."]
    assert texts(right) == [
        "top-1, onnxruntime: 91.24 %, original 91.38 %",
        "top-5, onnxruntime: 99.62 %, original 99.64 %",
        "top-1, onnxruntime: −0.14 (−0.40 to +0.10), p 0.30",
        "top-5, onnxruntime: −0.02 (−0.10 to +0.06), p 1.00",
        "no change",
        "gate of top-1 −0.30",
    ]
    assert "onnxruntime, original over 30 % sure: 99.1 %" in texts(moved) and "gate 97 %" in texts(moved)
    beside, own = right.charts[0].figure["data"]
    assert (own["x"], beside["x"]) == ([0.9124, 0.9962], [0.9138, 0.9964])
    change = right.charts[1].figure["data"][0]
    assert change["error_x"]["arrayminus"][0] == pytest.approx(0.0026)
    assert {shape["x0"] for shape in right.charts[1].figure["layout"]["shapes"]} == {0.0, -0.003}


def test_the_tables_behind_the_figures_hold_every_number() -> None:
    right, moved = accuracy(labelled.classifier(), labelled.classified())
    assert right.table.rows[:2] == [
        ["top-1 accuracy", "onnxruntime", "91.24 %", "90.42 % to 91.99 %", "ci95 by image"],
        ["change of top-1 accuracy, points", "onnxruntime", "−0.14", "−0.40 to +0.10", "McNemar p 0.30"],
    ]
    assert [row[2] for row in moved.table.rows] == ["0.00410", "98.6 %", "99.1 %"]
    assert all(len(row) == len(right.table.head) for row in [*right.table.rows, *moved.table.rows])


def test_without_labels_only_what_moved() -> None:
    (moved,) = accuracy(labelled.classifier(), labelled.classified(480, labels=False))
    assert len(moved.charts) == len(moved.sentences) == 1


def test_an_encoder_and_a_plain_graph() -> None:
    right, moved = accuracy(labelled.encoder(), labelled.retrieved())
    assert "recall at 1, onnxruntime: −0.5 (−1.7 to +0.6), p 0.69" in texts(right)
    assert "gate of recall at 1 −0.50" in texts(right) and right.charts[0].title == "Right partner found"
    assert not moved.charts, "a chart of one point is a sentence"
    assert moved.sentences[0].startswith("Cosine to the original: 0.99861 (")
    (only,) = accuracy(labelled.classifier(), labelled.plain())
    assert "onnxruntime, output scores: 11.00 %" in texts(only)


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            labelled.classified(),
            [
                "| 91.38 % | 91.24 % | 90.42 % to 91.99 %; −0.14 points (−0.40 to +0.10), McNemar p 0.30 |",
                "| same class, original over 30 % sure | | 99.10 % | 98.79 % to 99.33 % |",
                "| KL divergence | | 0.00410 | 0.00370 to 0.00450 nats |",
                "Scored on 5,000 images of made-up (eval); intervals 95 %; changes are paired, image by image, with",
            ],
        ),
        (
            labelled.retrieved(),
            [
                "| recall at 1 | 61.5 % | 61.0 % | 56.6 % to 65.3 %; −0.5 points (−1.7 to +0.6), McNemar p 0.69 |",
                "| cosine to the original | | 0.99861 | 0.99852 to 0.99870; least 0.98712 |",
                "Scored on 480 pairs of made-up (eval); intervals 95 %; changes are paired, pair by pair, with",
            ],
        ),
        (
            labelled.plain(),
            [
                "| **onnxruntime, output scores** | | | |",
                "| error relative to the original | | 11.00 % | 10.60 % to 11.40 % |",
            ],
        ),
    ],
)
def test_card_holds(rows: list[Row], lines: list[str]) -> None:
    text = card(labelled.classifier(), rows, [])
    for line in lines:
        assert line in text
    assert "calibrated on | fashion-mnist (calib), 512 items |" in text
    assert "gate top1\\_drop\\_max | ✓ holds | 0.140 ≤ 0.3 points" in text and "token ids" not in text


def test_screen_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed([document(labelled.classifier(), labelled.classified(), whole=False)], monkeypatch, 160)
    assert "90.42 % to 91.99 %; −0.14 points (−0.40 to +0.10), McNemar p 0.30" in text
    assert text.index("top-1 accuracy") < text.index("KL divergence") < text.index("same class as the original")


def test_page_holds() -> None:
    text = page(labelled.classifier(), labelled.classified(), [])
    assert "−0.14 points (−0.40 to +0.10), McNemar p 0.30, onnxruntime" in text
    assert "fashion-mnist (calib), 512 items" in text
    tile = page(labelled.classifier(), labelled.classified(480, labels=False), [])
    assert "98.6 %" in re.search(r'<dl class="tiles">.*?</dl>', tile, re.DOTALL)[0]  # type: ignore[index]


def test_what_is_measured_can_be_shown() -> None:
    """Rows as they come, odd ones too: nobody sure, one item, an output of nothing."""
    generator = np.random.default_rng(0)
    about = About("a" * 64, "b" * 64, "onnxruntime", Data(set="x", split="eval", sha256="c", items=20))
    before, after = generator.normal(size=(2, 20, 7)), generator.normal(size=(2, 20, 7))
    rows = [
        *classification(before[0], after[0], np.arange(20) % 7, about=about),
        *classification(np.zeros((1, 9)), np.zeros((1, 9)), np.array([3]), about=about),
        *retrieval(*before, *after, about=about),
        *outputs({"y": before[0]}, {"y": after[0]}, about=about),
        *outputs({"z": np.zeros((3, 2))}, {"z": np.ones((3, 2))}, about=about),
    ]
    for section in accuracy(labelled.classifier(), rows):
        for panel in section.charts:
            graph_objects.Figure(panel.figure)
    text = page(labelled.classifier(), rows, []) + card(labelled.classifier(), rows, [])
    assert "nan" not in re.sub(r'id="plotly">.*?</script>', "", text, flags=re.DOTALL).lower().split()
    assert len(figures.tables(rows)) == 3
