"""The report page: complete, offline, safe with what others wrote, and clean in a real browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted
import pytest

from quantkit.bundle import Manifest
from quantkit.errors import MissingDependency
from quantkit.measure.rows import Row
from quantkit.report import sections, speed
from quantkit.report.page import page

BATCHES = (1, 2, 4, 8, 16, 32)
DEVICE = {"id": "cpu-1", "kind": "cpu", "name": "A Processor"}


def timed_rows(subject: str = planted.CONTENT) -> list[Row]:
    """What `measure` gives for a decoder: a model whose speed-up falls with the batch and is lost between 8 and 16."""
    common: dict[str, Any] = {
        "subject": subject,
        "runtime": "onnxruntime",
        "settings": {"accuracy_level": 4, "threads": 2, "compute_type": "int8"},
        "device": DEVICE,
        "versions": {"onnxruntime": "1.31.1"},
        "aa_spread": 0.013,
        "n": 60,
    }
    rows = [
        Row(name="ceiling.read", value=23.1e9, unit="B/s", subject="cpu-1"),
        Row(name="ceiling.compute", value=2.1e11, unit="op/s", subject="cpu-1", settings={"compute_type": "int8"}),
    ]
    for context in (128, 1024):
        for batch in BATCHES:
            attention = 1e-6 * context * batch
            float_s, own_s = 0.030 + 0.0011 * batch + attention, 0.0098 + 0.0031 * batch + attention
            shape = {"new_tokens": 1, "context": context}
            rows.append(_time("latency.decode_step", own_s, float_s, {**common, "batch": batch, "shape": shape}))
            op = {"M": batch, "format": "int4", "hp_s": float_s}
            op |= {"bound_s": max(0.0042, 0.0013 * batch), "hp_bound_s": max(0.0233, 0.0009 * batch)}
            rows.append(
                Row(name="tax.total", value=own_s - op["bound_s"], unit="s", op=op, batch=batch, shape=shape, **common)
            )
            moved = {**common["settings"], "share_of_ceiling": 0.52}
            row = {**common, "settings": moved, "batch": batch, "shape": shape}
            rows.append(Row(name="bandwidth.effective", value=12.1e9, unit="B/s", **row))
        settings = {**common["settings"], "over": "batch", "ideal": 19.4, "wins": 1, "win_1_from": None}
        settings |= {"win_1_to": 10.1, "win_1_to_low": 9.6, "win_1_to_high": 10.7}
        rows.append(
            Row(
                name="tax.break_even",
                value=10.1,
                ci95=(9.6, 10.7),
                unit="1",
                shape={"new_tokens": 1, "context": context},
                **{**common, "settings": settings},
            )
        )
    for tokens in (64, 256, 1024):
        float_s, own_s = 0.012 + 0.00145 * tokens, 0.008 + 0.00152 * tokens
        shape = {"new_tokens": tokens, "context": 0}
        rows.append(_time("latency.prefill", own_s, float_s, {**common, "batch": 1, "shape": shape}))
    large = {"new_tokens": 4096, "context": 0}
    rows.append(
        Row(name="latency.prefill", value=None, unit="s", flags=["out-of-memory"], batch=1, shape=large, **common)
    )
    peak = {"subject": "f" * 64, "value": 912e6, "ratio": 912 / 391}
    rows.append(Row(name="memory.peak", value=391e6, unit="B", baseline=peak, **{**common, "n": 1}))
    return rows


def _time(name: str, own: float, base: float, common: dict[str, Any]) -> Row:
    ratio = base / own
    more = {"baseline_p90": base * 1.05, "baseline_p99": base * 1.15, "p99_ratio": ratio * 0.96}
    common = {**common, "settings": common["settings"] | more}
    return Row(
        name=name,
        value=own,
        unit="s",
        stat="median",
        better="lower",
        quantiles={"p50": own, "p90": own * 1.06, "p99": own * 1.2},
        ci95=(own * 0.985, own * 1.02),
        baseline={"subject": "f" * 64, "value": base, "ratio": ratio, "ratio_ci95": (ratio * 0.97, ratio * 1.03)},
        **common,
    )


def exported_rows(subject: str = planted.CONTENT) -> list[Row]:
    """Accuracy of the ONNX export at two accuracy levels, and its size."""
    rows = []
    for level, extra in ((0, 0.0), (4, 0.011)):
        common: dict[str, Any] = {
            "subject": subject,
            "runtime": "onnxruntime",
            "settings": {"accuracy_level": level, "threads": 2},
            "data": {"set": "prose-en", "split": "eval", "sha256": "e" * 64, "items": 6132},
            "shape": {"sequences": 12},
            "n": 6132,
            "flags": ["ci95-by-sequence", "source-was-gguf-q4_1"],
        }
        ratio = 0.927 - extra
        base = {"subject": "b", "value": 30.31, "ratio": ratio, "ratio_ci95": (ratio - 0.02, ratio + 0.02)}
        rows += [
            Row(name="accuracy.perplexity", value=30.31 / ratio, unit="1", baseline=base, **common),
            Row(name="accuracy.kl", value=0.0979 + extra, unit="nat", ci95=(0.088 + extra, 0.107 + extra), **common),
            Row(name="accuracy.top1_agreement", value=0.818 - extra, unit="1", ci95=(0.803 - extra, 0.833), **common),
        ]
    against = {"subject": "b", "value": 538e6, "ratio": 538 / 172}
    size = Row(name="size.bytes", value=172e6, unit="B", subject=subject, baseline=against, settings={"export": "onnx"})
    return [*rows, size]


def judged(**changes: Any) -> Manifest:
    """A bundle with an ONNX export, layers of three blocks, gates and a verdict."""
    scheme = planted.manifest().layers[0].scheme
    layers = [
        {
            "name": f"model.layers.{block}.{kind}",
            "shape": [576, 576],
            "scheme": scheme,
            "bits_per_weight": 4.3125,
            "error": 0.02 + 0.004 * block + 0.003 * i,
        }
        for block in range(3)
        for i, kind in enumerate(("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"))
    ]
    file = planted.manifest().files[0].model_dump(by_alias=True)
    names = (("onnx/model.onnx", "onnx"), ("onnx/genai_config.json", "config"))
    files = [file, *({**file, "path": path, "role": role} for path, role in names)]
    because = [
        "2.40× the speed of float32 at batch 1 (2.33 to 2.47)",
        "1.12× at batch 8 (1.09 to 1.15)",
        "0.81× at batch 16 (0.79 to 0.83)",
    ]
    given = {"answer": "ship_up_to", "batch": 8, "because": because}
    recipe = {**planted.manifest().recipe, "gates": {"kl_max": 0.25, "top1_agreement_min": 0.75}}
    return planted.manifest(**{"layers": layers, "files": files, "verdict": given, "recipe": recipe, **changes})


def everything() -> list[Row]:
    return [*planted.rows(), *exported_rows(), *timed_rows()]


def text_of(html: str) -> str:
    """The page without the packed library."""
    return re.sub(r'id="plotly">.*?</script>', 'id="plotly"></script>', html, flags=re.DOTALL)


@pytest.fixture(scope="module")
def full() -> str:
    pytest.importorskip("plotly")
    return page(judged(), everything(), [planted.NOTE], build_up=[(f"layers.{i}", 0.01 * (i + 1)) for i in range(3)])


@pytest.mark.parametrize(
    "part",
    [
        # the verdict with its three numbers
        "Ship it up to batch 8:",
        *("2.40× the speed of float32 at batch 1", "1.12× at batch 8", "0.81× at batch 16"),
        # speed
        *(
            "Faster at batch 1, 2, 4 and 8.",
            "Slower at batch 16 and 32.",
            "Break-even at batch 10 (95\u00a0% 9.6 to 11, ideal 19)",
        ),
        *("Slower at 256 and 1,024 tokens.", "At 64 tokens no difference shows above the noise."),
        *("4,096 tokens: does not fit into memory.", "The tax at batch 1 is 8.83\u00a0ms, 28 % of float32&#39;s time"),
        "The effective bandwidth at batch 1 is 12.1 GB/s, 52 % of what the machine reads.",
        *("23.1 GB/s read", "(A/A), 1.3 % at most", "2 threads; onnxruntime 1.31.1; accuracy level 4; A Processor"),
        # accuracy, layers, sizes
        *("onnxruntime, level 0", "onnxruntime, level 4"),
        *(planted.NOTE, "largest in model.layers.2.mlp.down_proj, 3.7 %", "the hidden state is off by 3.0 %"),
        *("172 MB", "peak memory", "damping-raised", "no factor", "0.01 → 0.1", "gate of the recipe"),
        # how to run it, and where it is from
        *("quantkit verify .", "AutoModelForCausalLM", "quantkit generate . --runtime onnxruntime", "og.Model("),
        *(
            "b" * 64,
            "c" * 64,
            "d" * 64,
            planted.CONTENT,
            "torch 2.13.0",
            "quantkit compile hf:org/a-model@main",
            "range: mse",
        ),
    ],
)
def test_page_holds(full: str, part: str) -> None:
    assert part in text_of(full)


def test_same_input_same_page(full: str) -> None:
    args = (judged(), everything(), [planted.NOTE])
    assert page(*args) == page(*args)


def test_one_file_of_a_few_megabytes(full: str) -> None:
    assert len(full.encode()) < 3e6
    assert full.count('id="plotly"') == 1


def test_nothing_is_fetched(full: str) -> None:
    body = text_of(full)
    assert not re.findall(r"<(?:link|img|iframe|object|base)\b|\bsrc=|@import|url\(", body)
    assert set(re.findall(r'href="([^"]*)"', body)) == {
        *("#speed", "#accuracy", "#layers", "#size", "#decisions", "#run", "#provenance")
    }


def test_the_policy_allows_these_scripts_alone(full: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', full)[1].replace("&#39;", "'")  # type: ignore[index]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    packed = re.search(r'id="plotly">(.*?)</script>', full, re.DOTALL)[1]  # type: ignore[index]
    own = re.search(r"<script>(.*?)</script>", full, re.DOTALL)[1]  # type: ignore[index]
    library = gzip.decompress(base64.b64decode(packed))
    assert {base64.b64encode(hashlib.sha256(x).digest()).decode() for x in (own.encode(), library)} == allowed
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_figures_are_json_and_plotly_takes_them(full: str) -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    found = re.findall(r'<script type="application/json">(.*?)</script>', full, re.DOTALL)
    assert len(found) == full.count('class="plot"') == 13
    for text in found:
        objects.Figure(json.loads(text))


def test_every_figure_has_its_words_and_every_table_its_heads(full: str) -> None:
    body = text_of(full)
    assert all(re.findall(r'class="plot" role="img" aria-label="([^"]*)"', body))
    assert body.count("<table") == body.count("</table>")
    assert body.count("<thead") + 1 == body.count("<table")  # the provenance has its heads in the rows


HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--"


def test_hostile_names_change_nothing(full: str) -> None:
    source = judged().model.source.model_copy(update={"ref": HOSTILE, "was": HOSTILE, "dtype": HOSTILE})
    model = judged().model.model_copy(update={"name": HOSTILE, "source": source})
    layers = [layer.model_copy(update={"name": f"{HOSTILE}.{i}.x"}) for i, layer in enumerate(judged().layers)]
    decision = judged().decisions[0].model_copy(update={"where": HOSTILE, "reason": HOSTILE, "code": HOSTILE})
    verdict = judged().verdict.model_copy(update={"because": [HOSTILE]})  # type: ignore[union-attr]
    bad = judged().model_copy(
        update={
            "model": model,
            "layers": layers,
            "decisions": [decision],
            "verdict": verdict,
            "recipe": {"name": HOSTILE},
        }
    )
    rows = [row.model_copy(update={"runtime": HOSTILE, "flags": [HOSTILE]}) for row in everything()]
    text = page(bad, rows, [HOSTILE], build_up=[(HOSTILE, 0.1)])
    assert "<img" not in text
    assert "<!--" not in text
    assert text.count("</script>") == text.count("<script")
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL):
        json.loads(data)
        assert "\u2028" not in data


def test_without_a_measurement_it_says_how_to_get_one() -> None:
    pytest.importorskip("plotly")
    text = text_of(page(planted.manifest(), planted.rows(), []))
    assert "Speed was not measured." in text
    assert "quantkit export . --to onnx &amp;&amp; quantkit measure . --runtime onnxruntime" in text
    assert 'id="speed"' not in text
    assert "quantkit generate" not in text


def test_a_converted_source_is_said_once() -> None:
    said = "The source was converted from gguf q4_1"
    assert sections.traps(exported_rows(), [])[0].startswith(said)
    assert sections.traps(exported_rows(), ["converted from GGUF Q4_1"]) == []


def test_a_failed_gate_comes_first() -> None:
    pytest.importorskip("plotly")
    checks = [*planted.manifest().checks, planted.FAILED_GATE]
    text = text_of(page(judged(state="gate_failed", checks=checks), [], []))
    assert "top1_agreement_min 0.821 &lt; 0.85" in text.split('class="verdict bad"')[0]


def test_a_baseline_and_an_empty_bundle_have_a_page() -> None:
    pytest.importorskip("plotly")
    text = text_of(page(planted.manifest(layers=[], files=[], decisions=[], checks=[], calibration=None), [], []))
    assert "A baseline." in text
    assert 'class="plot"' not in text


@pytest.mark.parametrize(
    ("given", "marks"),
    [
        # cut off at both ends: all of the range is shaded
        ({"wins": 1, "win_1_from": None, "win_1_to": None}, [(1, 32)]),
        ({"wins": 2, "win_1_from": None, "win_1_to": 3.0, "win_2_from": 9.0, "win_2_to": None}, [(1, 3), (9, 32)]),
        ({"wins": 0}, []),
    ],
)
def test_win_intervals_are_shaded(given: dict[str, Any], marks: list[tuple[float, float]]) -> None:
    pytest.importorskip("plotly")
    rows = [row for row in timed_rows() if row.name == "latency.decode_step" and row.shape["context"] == 128]  # type: ignore[index]
    settings = {"accuracy_level": 4, "over": "batch", **given}
    shape = {"new_tokens": 1, "context": 128}
    even = Row(
        name="tax.break_even", value=None, unit="1", subject="a", shape=shape, runtime="onnxruntime", settings=settings
    )
    (section,) = speed.sections(judged(), [*rows, even])
    shapes = section.panels[1].figure["layout"]["shapes"]
    shaded = [(s["x0"], s["x1"]) for s in shapes if s.get("fillcolor") == "var(--win)"]
    assert shaded == [pytest.approx((max(a, 1 / 1.18), b), rel=0.2) for a, b in marks]


def test_flags_become_warnings() -> None:
    rows = [row.model_copy(update={"flags": ["noisy"]}) if row.batch == 4 else row for row in timed_rows()]
    first = speed.sections(judged(), rows)[0]
    assert "at batch 4: the machine was noisy" in first.cautions


def test_plotly_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingDependency) as caught:
        page(planted.manifest(), [], [])
    assert caught.value.remedy == "pip install 'quantkit[report]'"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_it_without_a_word(full: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(full, encoding="utf-8")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000 --dump-dom"
    command = [str(CHROMIUM), *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # a refused request or script would stand here as an error of the policy
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    drawn = ran.stdout.split('id="plotly"')[0]
    assert drawn.count('class="plot js-plotly-plot"') == drawn.count('<svg class="main-svg"') / 3 == 13
    assert drawn.count('aria-label="Copy: ') == full.count('class="code"') == 7
    assert "rgb(10, 94, 168)" in drawn  # `--quantized`, as resolved from the page
