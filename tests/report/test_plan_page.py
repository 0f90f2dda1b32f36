"""The page of a plan: one offline file whose figures and tables are the outlook's."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import planned
import pytest
from plotly import graph_objects

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.planning.outlook import Outlook, Recommendation
from quantkit.report.kit import html, words
from quantkit.report.plan import figures as plan_figures
from quantkit.report.plan import words as plan_words
from quantkit.report.plan.document import document

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def three() -> Outlook:
    found = planned.outlook("bf16", "fp8", "int4", notes=["a <note> on `doctor`"])
    return replace(found, candidates=[*found.candidates, planned.refused()])


@pytest.fixture(scope="module")
def page(three: Outlook) -> str:
    return html.page(document(three))


def figures(page: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_one_offline_file_with_all_sections(page: str, three: Outlook, tmp_path: Path) -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    for title in ("Does it fit", "How long it takes", "What it gives", "Under the roofs", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    # two of memory, two of time, one of output, the roofline
    assert len(figures(page)) == 6
    assert page.count("<summary>The data as a table") == 4
    for figure in figures(page):
        graph_objects.Figure(figure)  # refuses what its schema does not know
    assert "a &lt;note&gt; on <code>doctor</code>" in page
    assert "Take int4." in page
    assert "only a measurement decides" in page
    assert "quantkit compile MODEL --recipe int4-best --target h100" in page
    for source in (three.target.memory.read_bandwidth.source, "vLLM documentation", "14 steps of 3 models"):
        assert source in page
    path = tmp_path / "plan.html"
    html.write(path, html.page(document(three)))
    assert path.read_text(encoding="utf-8") == page


def test_every_table_has_the_figures_of_the_outlook(page: str, three: Outlook) -> None:
    for each in three.candidates[:3]:
        assert each.memory is not None
        for row in each.rows:
            for timed in (row.prefill, row.step):
                assert timed is not None
                assert plan_words.bound(timed) in page
                assert plan_words.forecast(timed) in page
                assert words.size(timed.bound.bytes) in page
            assert plan_words.expected(row.rate(256)) in page
        for size in each.memory.parts.values():
            assert words.size(size) in page
    for figure in three.target.figures().values():
        assert figure.number is not None
        assert words.rate(figure.number, figure.unit) in page


def test_another_figure_is_another_page(three: Outlook, page: str) -> None:
    first, *rows = three.candidates[0].rows
    changed = html.page(document(planned.with_first(three, rows=[replace(first, parts={"weights": 33.3e9}), *rows])))
    assert "33.3 GB" in changed
    assert "33.3 GB" not in page


def test_points_lie_at_their_intensity_and_their_rate(three: Outlook) -> None:
    panel = plan_figures.roofline(three)
    assert panel is not None
    drawn = [each for each in panel.figure["data"] if each.get("hoverinfo") == "text"]
    rows = three.candidates[0].rows
    at_best, forecast = drawn[0], next(each for each in drawn if "open" not in each["marker"].get("symbol", ""))
    assert "open" in at_best["marker"]["symbol"]
    assert at_best["line"]["dash"] == "dot"
    for row, x, bound, expected in zip(rows, at_best["x"], at_best["y"], forecast["y"], strict=True):
        step = row.step.bound
        assert x == pytest.approx(step.operations / step.bytes)
        assert bound == pytest.approx(step.operations / step.seconds)
        assert expected == pytest.approx(0.6 * bound)


def test_a_roof_rises_with_the_memory_to_the_rate_of_its_type(three: Outlook) -> None:
    panel = plan_figures.roofline(three)
    assert panel is not None
    roofs = [each for each in panel.figure["data"] if each["line"].get("color") == "var(--ink)"]
    assert [roof["text"][1].split()[0] for roof in roofs] == ["bf16", "fp8_e4m3"]
    beta = three.target.memory.read_bandwidth.number
    for roof, kind in zip(roofs, ("bf16", "fp8_e4m3"), strict=True):
        (left, corner, _), (low, rate, level) = roof["x"], roof["y"]
        assert rate == level == three.target.compute[kind].number
        assert low / left == pytest.approx(rate / corner) == pytest.approx(beta)
        inside = panel.figure["layout"]["yaxis"]["range"]
        assert inside[0] <= math.log10(low) < math.log10(level) < inside[1]
    # no point is above the roof of its own type: bounds are bounds
    for each in panel.figure["data"]:
        if each.get("hoverinfo") == "text":
            assert all(y <= 1.0001 * min(beta * x, roofs[1]["y"][1]) for x, y in zip(each["x"], each["y"], strict=True))


def test_memory_stands_against_the_capacity(three: Outlook) -> None:
    panel = plan_figures.memory_bars(three)
    assert panel is not None
    (line,) = panel.figure["layout"]["shapes"]
    assert line["x0"] == three.target.memory.capacity.number
    for i, each in enumerate(three.candidates[:3]):
        assert each.memory is not None
        assert sum(part["x"][i] for part in panel.figure["data"]) == pytest.approx(each.memory.total)
    lines = plan_figures.memory_lines(three)
    assert lines is not None
    bf16 = three.candidates[0]
    drawn = next(each for each in lines.figure["data"] if each["name"] == "bf16")
    assert drawn["y"] == [pytest.approx(sum(row.parts.values())) for row in bf16.rows]


def test_bounds_alone_are_drawn_as_bounds() -> None:
    found = planned.outlook("bf16", "int4", efficiency=None)
    for panel in [*plan_figures.times(found), plan_figures.rates(found), plan_figures.roofline(found)]:
        assert panel is not None
        drawn = [each for each in panel.figure["data"] if each.get("hoverinfo") == "text"]
        assert drawn
        assert all(each["line"]["dash"] == "dot" and "open" in each["marker"]["symbol"] for each in drawn)
    page = html.page(document(found))
    assert "is a forecast from measurements" not in page
    assert "\u2265 int4" in json.dumps(figures(page), ensure_ascii=False)


def test_a_single_batch_an_encoder_and_a_target_without_figures() -> None:
    encoder = planned.outlook("int4", model="bert-base", workload=planned.work(8, prompt=128, output=0))
    shown = html.page(document(encoder))
    assert "sequences/s" in shown
    assert "diamonds" not in shown
    assert "a token of cache" not in shown
    assert not plan_figures.times(encoder), "a chart of one point is no chart"
    part = shown.split('id="time"')[1].split("</section>")[0]
    assert "<td" in part and "<details" not in part, "its table stands in the open"
    for figure in figures(shown):
        graph_objects.Figure(figure)
    shown = html.page(
        document(planned.outlook("int4", target=planned.unmeasured(), notes=["no figure for compute.fp32"]))
    )
    assert "no figure for compute.fp32" in shown
    assert "<h2>How long it takes</h2>" not in shown
    nothing = Outlook(
        encoder.architecture, encoder.target, encoder.workload, [planned.refused()], Recommendation(None, ["no"])
    )
    shown = html.page(document(nothing))
    assert not figures(shown)
    assert "SM 10.0 on" in shown


def test_hostile_text_stays_text() -> None:
    found = planned.outlook("bf16", "int4")
    cells = [replace(found.candidates[0].cells[0], source=HOSTILE, state="emulated")]
    hostile = planned.with_first(found, label=HOSTILE, recipe=HOSTILE, runtime=HOSTILE, cells=cells, notes=[HOSTILE])
    hostile = replace(
        hostile,
        architecture=replace(found.architecture, name=HOSTILE, assumed=[HOSTILE]),
        recommendation=Recommendation(HOSTILE, [HOSTILE]),
        notes=[HOSTILE],
    )
    shown = html.page(document(hostile))
    assert "<img" not in shown
    for figure in figures(shown):  # plotly reads some HTML in text
        assert "<img" not in json.dumps(figure)


def test_more_candidates_than_colours() -> None:
    found = planned.outlook("int4")
    many = replace(found, candidates=[replace(found.candidates[0], label=f"int4-{i}") for i in range(9)])
    assert len(set(plan_figures.colours(many).values())) == 6
    assert len(figures(html.page(document(many)))) == 6


def test_what_the_page_needs(monkeypatch: pytest.MonkeyPatch, three: Outlook, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file-unwritable"):
        html.write(tmp_path / "nowhere" / "x.html", html.page(document(three)))
    monkeypatch.setattr(machine, "has", lambda name: False)
    with pytest.raises(MissingDependency, match=r"quantkit\[report\]"):
        html.demand()


def test_what_does_not_fit_is_drawn_against_the_card_alone() -> None:
    found = planned.outlook("bf16", "int4", model="llama-3-70b")
    times = plan_figures.times(found)
    assert all(each.get("name") != "bf16" for panel in times for each in panel.figure["data"])
    memory = plan_figures.memory_lines(found)
    assert memory is not None
    assert any(each.get("name") == "bf16" for each in memory.figure["data"])
    page = html.page(document(found))
    assert "does not fit" in page
    assert "Batches that do not fit are in the table alone." in page
    nothing = html.page(document(planned.outlook("bf16", model="llama-3-70b")))
    assert "No batch fits." in nothing


def test_types_that_compute_at_one_rate_share_a_roof(three: Outlook) -> None:
    compute = {**three.target.compute, "fp8_e4m3": three.target.compute["bf16"]}
    panel = plan_figures.roofline(replace(three, target=three.target.model_copy(update={"compute": compute})))
    assert panel is not None
    roofs = [each for each in panel.figure["data"] if each["line"].get("color") == "var(--ink)"]
    assert [roof["text"][1] for roof in roofs] == ["bf16, fp8_e4m3 989 Tflop/s"]
