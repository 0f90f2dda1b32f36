"""What a comparison says, on one screen and as one offline file; nothing of a model's text acts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from quantkit.bundle import LayerEntry
from quantkit.errors import InputError
from quantkit.measurement.compared import (
    Compared,
    DecidedCell,
    LayerPair,
    NamedSide,
    Quantity,
    WordFlip,
    WordFlips,
    decided,
)
from quantkit.report import compared as say
from quantkit.report.compared import because, document
from quantkit.report.kit import html, words
from quantkit.stats.evidence import KNOWN, MeasuredValue, difference
from report.shown import figures, fits, printed

SIDE = NamedSide("./a bundle", "a" * 64, "awq-int4", 170_000_000, 4.3125, "torch")


def cell(
    name: str, effect: float, reach: float, *, what: str = "accuracy", margin: float = 0.01, **shape: int
) -> DecidedCell:
    measured = MeasuredValue(effect, (effect - reach, effect + reach))
    evidence = difference(measured, KNOWN, margin=margin, logarithm=what != "accuracy")
    how = "counted" if what == "size" else "ratio of ratios" if what == "latency" else "paired"
    batch = shape.pop("batch", None)
    one = Quantity(what, name, 0.4, 0.5, "1", how, evidence, n=60, batch=batch, shape=shape)  # type: ignore[arg-type]
    return DecidedCell.of(one, decided([one])[0])


CELLS = [
    cell("accuracy.next_word", 0.03, 0.002),
    cell("accuracy.kl", -0.2, 0.01),
    cell("accuracy.cosine", 0.0, 0.001),
    cell("latency.decode_step", 0.0, 0.2, what="latency", margin=0.05, batch=8, context=1024, new_tokens=1),
    cell("latency.prefill", 0.0, 0.001, what="latency", margin=0.05, batch=1, context=0, new_tokens=256),
    cell("size.bytes", 0.0, 0.0, what="size"),
]
DATA = Compared(
    "a-model",
    "decoder",
    SIDE,
    SIDE,
    "mixed",
    1,
    because(CELLS, "decoder"),
    CELLS,
    data="6,132 positions of prose-en (eval)",
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda data: printed([document(data)], monkeypatch)


def test_every_answer_has_its_reason() -> None:
    worse, better, open_, same = because(CELLS, "decoder")
    assert worse == "B is worse in next word right: −3.00 points (−3.20 to −2.80), margin 1.00"
    assert better == "B is better in KL divergence: −0.2000 nats (−0.2100 to −0.1900), margin 0.0100"
    assert open_.startswith("not decided, decode step, batch 8, context 1,024: 1.000 times as long (0.819 to 1.221)")
    assert "would have been seen" in open_
    assert same == "the same within the margin: cosine; prefill, batch 1, 256 tokens; weights"


def test_many_reasons_of_one_kind_are_counted() -> None:
    assert because([CELLS[0]] * 5, "decoder")[3:] == ["and in 2 more"]
    assert because([CELLS[3]] * 5, "decoder")[3:] == ["nor 2 more"]
    assert because([CELLS[5]] * 5, "decoder")[0].endswith("; and 2 more")


def test_times_of_several_devices_are_told_apart() -> None:
    here, there = (replace(CELLS[4], device=name, runtime="onnxruntime") for name in ("A Processor", "Another"))
    assert "A Processor" not in because([here], "decoder")[0]
    (said,) = because([here, there], "decoder")
    assert "prefill, batch 1, 256 tokens, A Processor, onnxruntime; prefill, batch 1, 256 tokens, Another" in said


def test_the_screen_says_how_it_is_known_and_fits(shown: Any) -> None:
    said = shown(DATA)
    for part in ("verdict: mixed", "item by item", "ratio of ratios", "4.31 bits a weight", "40.0 %", "inconclusive"):
        assert part in said, part
    assert "twice" in shown(replace(DATA, cells=[replace(CELLS[0], confirmed=True)]))
    assert "once" in shown(replace(DATA, cells=[replace(CELLS[0], confirmed=False)]))
    fits(said)


def test_text_of_a_model_does_nothing_to_a_terminal(shown: Any) -> None:
    flip = WordFlip(0, 3, "A", 2.0, "\x1b[2Jof the [red]", " war\r", "\x1b]0;x\x07", 0.6, " day", 0.2)
    said = shown(replace(DATA, flips=WordFlips(3, 1, 6132, 0.6, 0.97, [flip])))
    assert "… \\x1b[2Jof the [red] [·war\\r]" in said
    assert not {"\x1b", "\x07", "\r"} & set(said)
    assert "3 are right in A only and 1 in B only" in said


# --- the page --------------------------------------------------------------------------------------------------------

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


def test_one_offline_file_with_all_sections(page: str, tmp_path: Path) -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    for title in ("Accuracy", "Time, by batch", "Size", "Layer by layer", "Changed next words", "Provenance"):
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
    assert "<img" not in page and "\x1b" not in page
    assert '&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;\\x1b[2J <span class="tone strong">[·war]</span>' in page


def test_every_cell_has_its_line_and_its_place_in_a_figure(page: str) -> None:
    for each in WHOLE.cells:
        assert say.difference(each) in page
    (steps,) = [trace for trace in figures(page)[1]["data"] if trace.get("name") == "step, context 128"]
    assert steps["x"] == [1, 4, 16] and steps["y"] == pytest.approx([1 + each.effect for each in TIMES])
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
    for title in ("Accuracy", "Time, by batch", "Size", "Changed next words"):
        assert f"<h2>{title}</h2>" not in bare
    assert not figures(bare), "a layer without a known error is in the table alone"
    encoder = html.page(document(replace(WHOLE, kind="encoder", flips=None)))
    assert "pass, batch 1, 256 tokens" in encoder and "prefill" not in encoder


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
    assert "inputs int8 per token, scaled as the model runs" in said
