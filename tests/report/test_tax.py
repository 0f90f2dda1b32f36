"""The page and the screen of `quantkit tax`, from planted times."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import planted_ops
import pytest

from quantkit.bundle import Verdict
from quantkit.errors import InputError
from quantkit.measurement.operators.run import SweepJob
from quantkit.model.sizes import shapes
from quantkit.report import taxed as say
from quantkit.report.kit import html
from quantkit.report.kit.screen import write
from quantkit.report.taxed import Taxed, document, shares_of, split
from quantkit.target import Target

GOOD = Verdict(answer="ship_up_to", batch=8, format="int4.g64.level4", because=["batch 8: <b>fast</b>"])
BAD = Verdict(answer="do_not_quantize", format="nf4.g64", because=["batch 1: slow"])


def taxed(model: str = "vit-b-16", batches: tuple[int, ...] = (1, 8, 64)) -> Taxed:
    found = shapes.shipped(model) if model else shapes.typed(["256x64"])
    variants = ["int4.g64.level4", "nf4.g64"]
    linears = [each.model_dump() for each in found.distinct()][:2]
    rows = planted_ops.rows_of_a_run(SweepJob(linears, found.name, "float32", variants, batches, 2, 1.0))
    target = Target.load("cpu-x86")
    return Taxed(found, target, rows, {2: [GOOD, BAD]}, {2: GOOD}, {1: 0.7, 8: 0.3}, ["a <note>"])


@pytest.fixture(scope="module")
def data() -> Taxed:
    return taxed()


def text(data: Taxed) -> str:
    out = StringIO()
    write([document(data)], out)
    return out.getvalue()


def test_the_sum_comes_first_then_each_shape(data: Taxed) -> None:
    found = say.groups(data)
    assert [group.whole for group in found] == [True, False, False]
    assert found[0].title == "vit-b-16, 2 threads"
    assert found[1].title.startswith("768x768: q_proj, k_proj, v_proj, o_proj, 48 times")
    for group in found:
        assert [series.title for series in group.series] == ["int4.g64.level4", "nf4.g64"]
        for series in group.series:
            assert [cell.x for cell in series.cells] == [1, 8, 64]
            assert all(cell.bound and cell.original_bound for cell in series.cells)
            assert series.even is not None


def test_a_line_has_both_times_the_ratio_the_promise_and_the_tax(data: Taxed) -> None:
    (cell,) = [each for each in say.groups(data)[1].series[0].cells if each.x == 8]
    batch, times, ratio, _, ideal, gain, excess, share, slack, spread = say.line(cell, 1e3)
    own = planted_ops.falling(8) * 1e3
    assert batch == "8"
    assert times.startswith("1.00 → 0.6") or times.startswith("0.99")
    assert float(ratio.strip("~×")) == pytest.approx(1 / own, rel=0.03)
    bound, other = cell.bound * 1e3, cell.original_bound * 1e3
    assert float(ideal.strip("×")) == pytest.approx(other / bound, rel=0.02)
    assert float(excess) == pytest.approx(own - bound, rel=0.05)
    assert float(slack) == pytest.approx(1 - other, rel=0.05)
    assert share == f"{100 * (own - bound):.0f} %" or share.endswith("%")
    assert gain.endswith("%")
    assert spread.endswith("%")


def test_the_screen_fits_and_says_what_was_found(data: Taxed) -> None:
    shown = text(data)
    assert "ship int4.g64.level4 up to batch 8" in shown
    assert "nf4.g64 here" in shown
    assert "70 % of the steps at batch 1" in " ".join(shown.split())
    assert "only the" in shown, "of a black box only the sum is known"
    assert "GB/s" in shown
    assert "Break-even at batch" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_where_it_wins_with_the_intervals_of_the_ends(data: Taxed) -> None:
    first, second = say.groups(data)[1].series
    assert re.fullmatch(r"1 \(the first measured\) to 1\d(\.\d+)? \(1\d(\.\d+)?–1\d(\.\d+)?\)", say.wins(first))
    assert say.wins(second) == "nowhere"


def test_typed_shapes_have_their_lines_on_the_screen() -> None:
    shown = text(taxed(""))
    assert "256x64, 2 threads" in shown
    assert shown.count("MatMulNBits") == 0, "planted sides have another kernel"
    assert "fake" in shown


def test_the_page_is_one_offline_file_with_all_figures(data: Taxed, tmp_path: Path) -> None:
    path = tmp_path / "tax.html"
    html.write(path, html.page(document(data)))
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert "<b>fast</b>" not in page, "what comes from elsewhere is escaped"
    assert "a &lt;note&gt;" in page
    figures = [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    # a group has an overview, and of each of two formats three figures
    assert len(figures) == 3 * (1 + 2 * 3)
    assert {figure["layout"]["xaxis"]["type"] for figure in figures[:3]} == {"log"}
    labels = {each.get("name") for figure in figures for each in figure["data"]}
    assert {"int4", "float32", "int4 limit", "float32 limit", "measured", "promised"} <= labels
    for part in ("limit", "rest of the tax", "launch"):
        assert part in page
    assert "quantizing the input" not in page, "neither format does"
    for title in ("Each format", "The whole model", "Layer by layer", "Ceilings"):
        assert f"<h2>{title}</h2>" in page


def test_bars_are_shares_of_the_originals_time(data: Taxed) -> None:
    series = say.groups(data)[1].series[0]
    figure = split(series).figure
    for i, cell in enumerate(series.cells):
        total = sum(part["x"][i] for part in figure["data"])
        assert total == pytest.approx((cell.row.value or 0) / (cell.original or 1))
        assert figure["data"][0]["x"][i] == pytest.approx((cell.bound or 0) / (cell.original or 1))


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(answer="ship_it", format="int8.dynamic"), "ship int8.dynamic"),
        (Verdict(answer="use_instead", format="int4", batch=4), "use int4 instead, up to batch 4"),
        (Verdict(answer="do_not_quantize"), "do not quantize here"),
        (Verdict(answer="inconclusive", format="nf4"), "not decided about nf4"),
    ],
)
def test_answers_in_words(verdict: Verdict, words: str) -> None:
    assert say.said(verdict)[0] == words


def test_a_folder_that_is_not_there(data: Taxed, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file-unwritable"):
        html.write(tmp_path / "nowhere" / "x.html", html.page(document(data)))


def test_on_a_gpu_the_tax_is_split(tmp_path: Path) -> None:
    found = shapes.typed(["256x64"])
    linears = [each.model_dump() for each in found.distinct()]
    rows = planted_ops.rows_of_a_run(SweepJob(linears, "", "bfloat16", ["int4.g128"], [1, 8], 0, 1.0))
    verdicts = {0: [GOOD.model_copy(update={"format": "int4.g128"})]}
    data = Taxed(found, Target.load("h200"), rows, verdicts, {0: verdicts[0][0]}, baseline="bfloat16")
    said = text(data)
    assert "256x64, GPU" in said
    assert "bfloat16 → this" in said
    assert "float32" not in said
    assert "black box" not in said
    (cell, _) = say.groups(data)[0].series[0].cells
    shares = shares_of(cell)
    assert sum(shares.values()) == pytest.approx((cell.row.value or 0) / (cell.original or 1))
    assert shares["decode"] == pytest.approx(0.25 * (cell.row.value or 0) / (cell.original or 1), rel=0.05)
    assert shares["streaming"] > 0
    assert shares["rest"] == 0
    page = html.page(document(data))
    assert "streaming loss" in page
    assert "decoding" in page
    assert "on the same device" in page
