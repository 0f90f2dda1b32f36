"""Times as curves: rows of latency, a tab for each device, the page and the screen of a tax."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import planted
import planted_ops
import pytest

from quantkit.bundle import Manifest, Verdict
from quantkit.errors import InputError
from quantkit.measurement.operators.run import SweepJob
from quantkit.measurement.rows import Row
from quantkit.model.sizes import shapes
from quantkit.report import taxed as say
from quantkit.report.bundle import curves
from quantkit.report.bundle.speed import HERE, DeviceRows, all_devices
from quantkit.report.bundle.speed import on_devices as parts
from quantkit.report.kit import html
from quantkit.report.kit.screen import write
from quantkit.report.kit.tree import Section
from quantkit.report.taxed import Taxed, document, shares_of, split
from quantkit.target import Target
from report.reached import DEVICES, on_devices, there
from report.shown import page
from report.timed import BATCHES, judged, timed_rows


def encoder() -> Manifest:
    return judged(model=planted.manifest().model.model_copy(update={"kind": "encoder"}))


def passed(batch: int, tokens: int, **changes: Any) -> Row:
    base = {"subject": "f" * 64, "value": 0.02 * batch, "ratio": 2.0, "ratio_ci95": (1.9, 2.1)}
    shape = {"new_tokens": tokens, "context": 0}
    data = {"value": 0.01 * batch, "unit": "s", "batch": batch, "shape": shape, "baseline": base, **changes}
    return Row(name="latency.prefill", subject=planted.CONTENT, runtime="onnxruntime", **data)


def test_a_decoder_has_its_steps_over_the_batch_and_its_prompts_over_the_length() -> None:
    found = curves.series(judged(), timed_rows())
    assert [(curve.over, [cell.x for cell in curve.cells]) for curve in found] == [
        ("batch", [1, 2, 4, 8, 16, 32]),
        ("batch", [1, 2, 4, 8, 16, 32]),
        ("tokens", [64, 256, 1024]),
    ]
    assert [cell.x for cell in found[2].skipped] == [4096]


def test_a_model_that_does_not_decode_has_its_passes_over_the_batch() -> None:
    rows = [passed(batch, tokens) for tokens in (64, 256) for batch in (8, 1)]
    even = {"over": "batch", "ideal": 12.0}
    rows.append(
        Row(
            name="tax.break_even",
            value=4.0,
            unit="1",
            subject=planted.CONTENT,
            runtime="onnxruntime",
            shape={"new_tokens": 256, "context": 0},
            settings=even,
        )
    )
    first, second = curves.series(encoder(), rows)
    assert (first.title, [cell.x for cell in first.cells]) == ("Forward pass of 64 tokens", [1, 8])
    assert curves.break_even(first) == ""
    assert curves.break_even(second) == "Break-even at batch 4.0 (ideal 12)."


def test_levels_are_curves_of_their_own() -> None:
    rows = [passed(1, 64, settings={"accuracy_level": level}) for level in (0, 4)]
    titles = [curve.title for curve in curves.series(judged(), rows)]
    assert titles == ["Prefill at batch 1, onnxruntime, level 0", "Prefill at batch 1, onnxruntime, level 4"]


def test_a_brief_line_has_both_sides_in_one_unit() -> None:
    head, body = curves.brief(curves.series(judged(), timed_rows())[0])
    assert head == ["batch", "p50, ms", "speed-up", "95 %", "p99, ms", "token/s", "of read"]
    assert body[0] == ["1", "31.2 → 13.0", "2.40×", "2.32 to 2.48", "35.9 → 15.6", "76.8", "52 %"]


def test_without_a_ceiling_there_is_no_share_of_it() -> None:
    rows = [row for row in timed_rows() if row.name.startswith("latency.")]
    head, _ = curves.brief(curves.series(judged(), rows)[0])
    assert "of read" not in head


@pytest.mark.parametrize("flag", ["noisy", "aa-exceeds-effect"])
def test_noise_is_marked_and_explained(flag: str) -> None:
    close = {"ratio": 1.04, "ratio_ci95": (1.01, 1.07)}
    rows = [
        row.model_copy(update={"flags": [flag], "baseline": row.baseline and row.baseline.model_copy(update=close)})
        if row.batch == 4
        else row
        for row in timed_rows()
    ]
    curve = curves.series(judged(), rows)[0]
    _, body = curves.brief(curve)
    assert [line[2].startswith("~") for line in body] == [False, False, True, False, False, False]
    assert "~ marks noise" in curves.how(curve)
    assert curves.cautions(curve)[0].startswith("at batch 4: ")


@pytest.mark.parametrize(("dtype", "name"), [("float32", "float32"), ("bfloat16", "original")])
def test_the_float_side_is_called_what_it_computes_in(dtype: str, name: str) -> None:
    model = planted.manifest().model
    source = model.source.model_copy(update={"dtype": dtype})
    assert curves.names(judged(model=model.model_copy(update={"source": source}))) == ("int4", name)


def test_a_prompt_that_is_too_long_says_so() -> None:
    rows = [passed(1, 64), passed(1, 4096, value=None, flags=["prompt-too-long"], baseline=None)]
    (curve,) = curves.series(judged(), rows)
    assert curves.skipped(curve) == ["4,096 tokens: longer than the model's context."]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_each_device_has_a_tab_and_a_verdict_of_its_own() -> None:
    manifest, rows, devices = on_devices()
    found = page(manifest, rows, [], devices=devices)
    assert re.findall(r"<summary>(pi5|box)</summary>", found) == ["pi5", "box"]
    assert found.count('name="tab"') == 2
    # this machine's at the top, the others' in their tabs
    answers = ["Ship it up to batch 8.", "Ship it up to batch 4.", "Ship it up to batch 16."]
    places = [found.index(answer, found.index("<body")) for answer in answers]
    assert places == sorted(places)
    for name, (processor, machine, isa, *_) in DEVICES.items():
        assert f"{processor}, {machine}, {isa}" in found, name


def test_a_tab_says_what_its_device_met() -> None:
    flagged = [row.model_copy(update={"flags": ["throttled"]}) for row in there("pi5")]
    emulated = [row.model_copy(update={"flags": ["emulated"]}) for row in there("box")]
    devices = [DeviceRows("pi5", flagged, Verdict(answer="ship")), DeviceRows("qemu", emulated, None)]
    hot, program = (html.fragment([tab]) for tab in parts(judged(), [], devices) if isinstance(tab, Section))
    assert "lowered its clock" in hot
    assert "No verdict." in program and "its times are an emulator&#39;s" in program
    assert "An emulator: its results count" in program


def test_one_picture_shows_all_by_batch() -> None:
    manifest, rows, devices = on_devices()
    (section,) = all_devices(manifest, rows, devices)
    assert len(section.charts) == 2
    for panel, what in zip(section.charts, ("Speed-up", "Tax"), strict=True):
        assert panel.title.startswith(what)
        assert "against batch, of here, pi5 and box" in panel.alt
    assert section.table is not None
    names = [line[0] for line in section.table.rows]
    assert names == [name for name in (HERE, *DEVICES) for _ in BATCHES]
    speed = {(line[0], line[1]): line[2] for line in section.table.rows}
    assert (speed[HERE, "1"], speed["pi5", "1"], speed["box", "1"]) == ("2.40×", "2.00×", "3.00×")
    # of one alone there is nothing to compare
    assert all_devices(manifest, rows, []) == [] and all_devices(manifest, [], devices[:1]) == []


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_tabs_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    manifest, rows, devices = on_devices()
    path, said = tmp_path / "report.html", []
    path.write_text(page(manifest, rows, [], devices=devices), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1200, "height": 900})
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.goto(path.as_uri())
        pi5, box = (shown.locator("#devices details", has_text=name).first for name in ("Cortex-A76", "EPYC"))
        # one at a time, side by side, and what was folded is drawn
        assert pi5.get_by_text("Ship it up to batch 4.").is_visible()
        assert not box.get_by_text("Ship it up to batch 16.").is_visible()
        box.locator("summary", has_text="box").first.click()
        assert box.get_by_text("Ship it up to batch 16.").is_visible()
        assert not pi5.get_by_text("Ship it up to batch 4.").is_visible()
        box.locator(".plot svg").first.wait_for()
        shown.set_viewport_size({"width": 400, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") == 400
        browser.close()
    assert said == []


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
    assert "ship int4.g64.level4 up to batch 8" in shown and "nf4.g64 here" in shown
    assert "70 % of the steps at batch 1" in " ".join(shown.split())
    assert "only the" in shown, "of a black box only the sum is known"
    assert "GB/s" in shown and "Break-even at batch" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_where_it_wins_with_the_intervals_of_the_ends(data: Taxed) -> None:
    first, second = say.groups(data)[1].series
    assert re.fullmatch(r"1 \(the first batch measured\) to 1\d(\.\d+)? \(1\d(\.\d+)?–1\d(\.\d+)?\)", say.wins(first))
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
    assert say.verdict_words(verdict)[0] == words


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
    assert "256x64, GPU" in said and "bfloat16 → this" in said and "float32" not in said
    assert "typed" not in said
    assert "black box" not in said
    (cell, _) = say.groups(data)[0].series[0].cells
    shares = shares_of(cell)
    assert sum(shares.values()) == pytest.approx((cell.row.value or 0) / (cell.original or 1))
    assert shares["decode"] == pytest.approx(0.25 * (cell.row.value or 0) / (cell.original or 1), rel=0.05)
    assert shares["streaming"] > 0 and shares["rest"] == 0
    page = html.page(document(data))
    assert "streaming loss" in page and "decoding" in page and "on the same device" in page
