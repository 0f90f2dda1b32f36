"""The page of a comparison: one offline file whose figures and tables are what was decided."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from quantkit.bundle import LayerEntry
from quantkit.errors import InputError
from quantkit.measurement.compared import LayerPair, WordFlip, WordFlips
from quantkit.report import compared as say
from quantkit.report.compared import document
from quantkit.report.kit import html, words

from .test_compare import DATA, cell

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J"


def layer(name: str, error: float | None) -> LayerEntry:
    scheme = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False, "scale": "float16"}
    return LayerEntry(name=name, shape=[8, 64], scheme=scheme, bits_per_weight=4.3, error=error)


FLIPS = WordFlips(3, 1, 6132, 0.6, 0.97, [WordFlip(0, 3, "A", 2.0, HOSTILE, " war", " war", 0.6, " day", 0.2)])
TIMES = [
    cell("latency.decode_step", 0.02, 0.01, what="latency", margin=0.05, batch=batch, context=128, new_tokens=1)
    for batch in (1, 4, 16)
]
LAYERS = [LayerPair(f"model.layers.{i}.up_proj", None, layer(f"model.layers.{i}.up_proj", 0.01 * i)) for i in (1, 2)]
WHOLE = replace(
    DATA, cells=[*DATA.cells, *TIMES], flips=FLIPS, layers=LAYERS, notes=["a note <img>"], because=["because"]
)


@pytest.fixture(scope="module")
def page() -> str:
    return html.page(document(WHOLE, "1.2.3"))


def figures(page: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_one_offline_file_with_all_sections(page: str, tmp_path: Path) -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    for title in ("Accuracy", "Time, by batch", "Size", "Layer by layer", "Next words that flipped", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    assert "<strong>Mixed: B is better in one thing and worse in another.</strong>" in page
    assert "Because" in page
    # accuracy, times by batch, one time alone, size, a heat map of B: A has no error to show
    assert len(figures(page)) == 5
    for figure in figures(page):
        graph_objects.Figure(figure)  # refuses what its schema does not know
    path = tmp_path / "compare.html"
    html.write(path, html.page(document(WHOLE, "1.2.3")))
    assert path.read_text(encoding="utf-8") == page
    with pytest.raises(InputError, match="file-unwritable"):
        html.write(tmp_path / "nowhere" / "x.html", html.page(document(WHOLE)))


def test_what_a_model_says_is_text_and_nothing_else(page: str) -> None:
    assert "<img" not in page
    assert "\x1b" not in page
    assert '&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;\\x1b[2J <span class="tone strong">[·war]</span>' in page


def test_every_cell_has_its_line_and_its_place_in_a_figure(page: str) -> None:
    for each in WHOLE.cells:
        assert say.difference(each) in page
    (steps,) = [trace for trace in figures(page)[1]["data"] if trace.get("name") == "step, context 128"]
    assert steps["x"] == [1, 4, 16]
    assert steps["y"] == pytest.approx([1 + each.effect for each in TIMES])
    margins = next(trace for trace in figures(page)[0]["data"] if "error_x" in trace)["x"]
    assert margins == pytest.approx([each.effect / each.margin for each in WHOLE.cells if each.what == "accuracy"])


def test_both_sides_of_layers_are_drawn_on_one_scale_and_an_empty_one_is_not(page: str) -> None:
    def heats(html: str) -> list[dict[str, Any]]:
        return [trace for figure in figures(html) for trace in figure["data"] if trace["type"] == "heatmap"]

    (only,) = heats(page)  # A's layers are in floats: no error anywhere
    assert (only["z"], only["zmin"], only["zmax"]) == ([[0.01, 0.02]], 0.0, 0.02)
    turned = [LayerPair(each.name, each.b, each.b) for each in WHOLE.layers]
    both = heats(html.page(document(replace(WHOLE, layers=turned))))
    assert [(each["zmin"], each["zmax"]) for each in both] == [(0.0, 0.02)] * 2
    assert "relative squared weight error" in page


def test_what_is_not_known_has_no_section() -> None:
    bare = html.page(document(replace(WHOLE, cells=[], flips=None, layers=[LayerPair("x", layer("x", None), None)])))
    for title in ("Accuracy", "Time, by batch", "Size", "Next words that flipped"):
        assert f"<h2>{title}</h2>" not in bare
    assert not figures(bare), "a layer without a known error is in the table alone"
    encoder = html.page(document(replace(WHOLE, kind="encoder", flips=None)))
    assert "pass, batch 1, 256 tokens" in encoder
    assert "prefill" not in encoder


def test_a_flip_without_its_text_is_shown_by_its_place() -> None:
    flip = WordFlip(7, 3, "B", -2.0, None, None, "#5", 0.6, "#9", 0.2)
    shown = html.page(document(replace(WHOLE, flips=replace(FLIPS, examples=[flip]))))
    assert "sequence 7, position 3" in shown


def test_small_figures_keep_digits() -> None:
    small = cell("accuracy.kl", -2.6e-5, 1e-5)
    assert say.difference(small, margin=False) == "−0.000026 nats (−0.000036 to −0.000016)"
    assert words.share(6.54e-5) == "0.0065 %"


def test_inputs_that_differ_are_told() -> None:
    one = layer("x", 0.0)
    other = one.model_copy(update={"activations": {"format": "int8", "granularity": "token", "dynamic": True}})
    (said, *_) = say.layer_sentences([LayerPair("x", one, other)])
    assert "inputs int8 per token, as the model runs" in said
