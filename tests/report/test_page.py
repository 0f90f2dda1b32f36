"""The report page: complete, offline, safe with what others wrote."""

import base64
import gzip
import hashlib
import re
import sys
from typing import Any

import planted
import pytest
from plotly import graph_objects

from quantkit.errors import MissingDependency
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, speed
from quantkit.report.bundle.accuracy import traps
from report.hurt import hurt
from report.shown import HOSTILE, figures, page, text_of
from report.timed import everything, exported_rows, judged, onnx_only, timed_rows


@pytest.fixture(scope="module")
def full() -> str:
    return page(judged(), everything(), [planted.NOTE], harm=hurt())


def test_page_holds(full: str) -> None:
    text = text_of(full)
    for part in (
        # the verdict with its three numbers
        "Ship it up to batch 8.",
        *("2.40× the speed of float32 at batch 1", "1.12× at batch 8", "0.81× at batch 16"),
        # speed
        *("Faster at batch 1, 2, 4 and 8.", "Slower at batch 16 and 32."),
        "Break-even at batch 10 (95\u00a0% 9.6 to 11, ideal 19)",
        *("Slower at 256 and 1,024 tokens.", "At 64 tokens no difference shows above the noise."),
        *("4,096 tokens: does not fit into memory.", "The tax at batch 1 is 8.83\u00a0ms, 28 % of float32&#39;s time"),
        "The effective bandwidth at batch 1 is 12.1 GB/s, 52 % of what the machine reads.",
        *("23.1 GB/s read", "A/A spread 1.3 % at most", "2 threads; onnxruntime 1.31.1; accuracy level 4; A Processor"),
        # accuracy, layers, sizes
        *("onnxruntime, level 0", "onnxruntime, level 4"),
        *(
            planted.NOTE,
            "largest in model.layers.2.mlp.down_proj, 3.7 %",
            "the hidden state has a relative error of 3.0 %",
        ),
        "Where the loss comes from: down_proj (",
        "has 80 % of the squared output error of all layers",
        "By depth, half of the error comes from 1 of 3 blocks: 2.",
        *("24 % of the total KL comes from the worst 1 %", "… the cat sat on the·", "·mat (75 %)", "⏎ (50 %)"),
        "2 of 3 shared inputs had a channel more than 20 times its median channel; now 0 have one.",
        *("172 MB", "peak memory", "damping-raised", "no factor", "0.01 → 0.1", "gate kl_max"),
        # how to run it, and where it is from
        *("quantkit verify .", "AutoModelForCausalLM", "quantkit generate . --runtime onnxruntime", "og.Model("),
        *("b" * 64, "c" * 64, "d" * 64, planted.CONTENT, "torch 2.13.0"),
        *("quantkit compile hf:org/a-model@main", "range: mse"),
    ):
        assert part in text, part
    assert page(judged(), everything(), [planted.NOTE], harm=hurt()) == full, "the same input, the same page"


def test_one_file_of_a_few_megabytes_that_fetches_nothing(full: str) -> None:
    assert len(full.encode()) < 3e6
    assert full.count('id="plotly"') == 1
    body = text_of(full)
    assert not re.findall(r"<(?:link|img|iframe|object|base)\b|\bsrc=|@import|url\(", body)
    chapters = ("#speed", "#accuracy", "#harm", "#size", "#decisions", "#run", "#provenance")
    assert set(re.findall(r'href="([^"]*)"', body)) == set(chapters)


def test_the_policy_allows_these_scripts_alone(full: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', full)[1].replace("&#39;", "'")  # type: ignore[index]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    packed = re.search(r'id="plotly">(.*?)</script>', full, re.DOTALL)[1]  # type: ignore[index]
    own = re.search(r"<script>(.*?)</script>", full, re.DOTALL)[1]  # type: ignore[index]
    library = gzip.decompress(base64.b64decode(packed))
    assert {base64.b64encode(hashlib.sha256(x).digest()).decode() for x in (own.encode(), library)} == allowed
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_figures_are_json_that_plotly_takes_with_words_and_tables_with_heads(full: str) -> None:
    assert len(figures(full)) == full.count('class="plot"') == 17
    for figure in figures(full):
        graph_objects.Figure(figure)
    body = text_of(full)
    assert all(re.findall(r'class="plot" role="img" aria-label="([^"]*)"', body))
    assert body.count("<table") == body.count("</table>")
    assert body.count("<thead") + 2 == body.count("<table")  # the provenance has its heads in the rows


def test_hostile_names_change_nothing() -> None:
    usual = judged()
    source = usual.model.source.model_copy(update={"ref": HOSTILE, "was": HOSTILE, "dtype": HOSTILE})
    decision = usual.decisions[0].model_copy(update={"where": HOSTILE, "reason": HOSTILE, "code": HOSTILE})
    changes = {
        "model": usual.model.model_copy(update={"name": HOSTILE, "source": source}),
        "layers": [layer.model_copy(update={"name": f"{HOSTILE}.{i}.x"}) for i, layer in enumerate(usual.layers)],
        "decisions": [decision],
        "verdict": usual.verdict.model_copy(update={"because": [HOSTILE]}),  # type: ignore[union-attr]
        "recipe": {"name": HOSTILE},
    }
    rows = [row.model_copy(update={"runtime": HOSTILE, "flags": [HOSTILE]}) for row in everything()]
    text = page(usual.model_copy(update=changes), rows, [HOSTILE], harm=hurt(HOSTILE))
    assert "<img" not in text and "<!--" not in text
    assert text.count("</script>") == text.count("<script")
    assert figures(text) and not any("\u2028" in data for data in re.findall('json">(.*?)</script>', text, re.DOTALL))


def test_without_a_measurement_it_says_how_to_get_one() -> None:
    text = text_of(page(planted.manifest(), planted.rows(), []))
    assert "Not measured yet: nothing says whether it is faster" in text
    assert "quantkit export . --to onnx\nquantkit measure . --runtime onnxruntime" in text
    assert 'id="speed"' not in text and "quantkit generate" not in text
    text = text_of(page(onnx_only(), exported_rows(), []))
    assert "Not measured yet: nothing says whether it is faster" in text
    assert "quantkit export" not in text and "quantkit generate . --runtime onnxruntime" in text
    assert not re.search("from_pretrained|vllm|og.Model", text), "there is no checkpoint"


def test_a_bad_verdict_is_said_as_it_is() -> None:
    verdict = {"answer": "do_not_quantize", "because": ["batch 1: 0.9 times as fast", "batch 8: 0.4 times as fast"]}
    text = text_of(page(onnx_only(verdict=verdict), timed_rows(), []))
    told = text.split('class="verdict bad"')[1].split("</div>")[0]
    assert "Do not quantize here." in told
    assert re.findall("<li>(.*?)</li>", told) == verdict["because"]


def test_what_is_undecided_is_neither_good_nor_bad_and_no_large_number() -> None:
    def shown(answer: str) -> tuple[str, str]:
        text = text_of(page(onnx_only(verdict={"answer": answer}), timed_rows(), []))
        return text.split('<div class="verdict ')[1].split('"')[0], text.split('<dd class="value">')[1].split("<")[0]

    assert shown("intervals") == ("open", "2.40×")
    assert shown("inconclusive") == ("inconclusive", "not decided")


def test_a_loss_is_not_styled_as_a_win() -> None:
    def slower(row: Row) -> Row:
        against = row.baseline
        if against is None or not row.name.startswith("latency.") or not against.ratio:
            return row
        return row.model_copy(update={"baseline": against.model_copy(update={"ratio": 0.8, "ratio_ci95": (0.7, 0.9)})})

    text = text_of(page(onnx_only(verdict={"answer": "intervals"}), [slower(row) for row in timed_rows()], []))
    tile = text.split('<dl class="tiles">')[1].split("</div>")[0]
    assert '<div class="bad"><dt>the speed in decode: slower</dt><dd class="value">0.800×</dd>' in tile


def test_a_chart_of_one_point_is_a_sentence_and_few_steps_are_told_once() -> None:
    steps = [row for row in timed_rows() if (row.shape or {}).get("context") == 128 or row.name == "ceiling.read"]
    few = [row.model_copy(update={"flags": ["p99-from-few"]}) for row in steps if row.batch in {1, None}]
    text = text_of(page(onnx_only(), few, []))
    assert re.search(r"At batch 1 a step takes [^:]*: 2.40× the speed \(2.32× to 2.48×\)", text)
    assert 'class="plot"' not in text.split('id="speed"')[1].split("</section>")[0]
    assert text.count("99th percentiles rest on few steps") == 1


def test_a_converted_source_is_said_once() -> None:
    assert traps(exported_rows(), [])[0].startswith("The source was converted from gguf q4_1")
    assert traps(exported_rows(), ["converted from GGUF Q4_1"]) == []


def test_a_failed_gate_comes_first_and_an_empty_bundle_has_a_page() -> None:
    checks = [*planted.manifest().checks, planted.FAILED_GATE]
    text = text_of(page(judged(state="gate_failed", checks=checks), [], []))
    assert "top1_agreement_min 0.821 &lt; 0.85" in text.split('class="verdict bad"')[0]
    text = text_of(page(planted.manifest(layers=[], files=[], decisions=[], checks=[], calibration=None), [], []))
    assert "the bundle is a baseline for others" in text and 'class="plot"' not in text


@pytest.mark.parametrize(
    ("wins", "marks"),
    [
        # cut off at both ends: all of the range is shaded
        ({"wins": 1, "win_1_from": None, "win_1_to": None}, [(1, 32)]),
        ({"wins": 2, "win_1_from": None, "win_1_to": 3.0, "win_2_from": 9.0, "win_2_to": None}, [(1, 3), (9, 32)]),
        ({"wins": 0}, []),
    ],
)
def test_win_intervals_are_shaded(wins: dict[str, Any], marks: list[tuple[float, float]]) -> None:
    shape = {"new_tokens": 1, "context": 128}
    rows = [row for row in timed_rows() if row.name == "latency.decode_step" and row.shape == shape]
    known = {"shape": shape, "runtime": "onnxruntime", "settings": {"accuracy_level": 4, "over": "batch", **wins}}
    even = Row(name="tax.break_even", value=None, unit="1", subject="a", **known)
    (section,) = speed.sections(judged(), [*rows, even])
    shapes = section.charts[1].figure["layout"]["shapes"]
    shaded = [(s["x0"], s["x1"]) for s in shapes if s.get("fillcolor") == "var(--win)"]
    assert shaded == [pytest.approx((max(a, 1 / 1.18), b), rel=0.2) for a, b in marks]


def test_plotly_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingDependency) as caught:
        page(planted.manifest(), [], [])
    assert caught.value.remedy == "in the clone of quantkit: pip install -e '.[report]'"


def test_flags_become_warnings_and_what_is_in_every_curve_is_told_once() -> None:
    def noisy(*batches: int | None) -> list[Row]:
        every = [(row, {"flags": [*row.flags, "noisy"]}) for row in timed_rows()]
        named = [row.name.startswith("latency.") and (not batches or row.batch in batches) for row, _ in every]
        return [row.model_copy(update=flags) if is_ else row for (row, flags), is_ in zip(every, named, strict=True)]

    some = curves.shared_cautions(curves.series(judged(), noisy(4)))
    told = (
        "Decode with 128 tokens of context and decode with 1,024 tokens of context, at batch 4: the machine was noisy"
    )
    assert told in some
    assert text_of(page(onnx_only(), noisy(), [])).count("at every size: the machine was noisy") == 1
    assert text_of(page(judged(), noisy(4), [])).count("the machine was noisy") == 1


def test_decode_and_prefill_of_every_runtime_stand_in_one_picture() -> None:
    """Tokens a second are counted here from the rows: batch times new tokens over seconds."""
    ours = [row for row in timed_rows() if row.name.startswith("latency.") and row.value]
    halved = [{"runtime": "torch", "settings": {}, "value": (row.value or 0.0) / 2} for row in ours]
    card = [row.model_copy(update=changes) for row, changes in zip(ours, halved, strict=True)]
    (section,) = speed.overview(curves.series(judged(), [*ours, *card]))
    assert section.title == "All runtimes"
    assert [panel.title for panel in section.charts] == ["Decode with 128 tokens of context", "Prefill at batch 1"]
    for panel, name in zip(section.charts, ("latency.decode_step", "latency.prefill"), strict=True):
        drawn = {each["name"]: each["y"] for each in panel.figure["data"]}
        cells = [(row.batch or 0, row.shape or {}, row) for row in ours if row.name == name]
        cells = [(batch * shape["new_tokens"], shape, row) for batch, shape, row in cells if shape["context"] < 1024]
        known = {
            "int4, onnxruntime, level 4": [tokens / (row.value or 0.0) for tokens, _, row in cells],
            "int4, torch": [2 * tokens / (row.value or 0.0) for tokens, _, row in cells],
            "float32, torch": [tokens / row.baseline.value for tokens, _, row in cells if row.baseline],
        }
        known["float32, onnxruntime, level 4"] = known["float32, torch"]
        assert drawn == {label: pytest.approx(rates) for label, rates in known.items()}
    rows = [row for row in timed_rows() if row.name == "latency.prefill"]
    assert speed.overview(curves.series(judged(), rows)) == [], "one curve alone needs no other picture"
