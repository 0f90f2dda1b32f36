"""What an engine does, and what was kept high in mixed precision, on the page and on screen."""

from typing import Any

import planted
import pytest
from plotly import graph_objects
from pydantic import ValidationError

from quantkit.measurement.accuracy.harm import Harm, MixedSearch
from quantkit.measurement.engine_layers import Costly, EngineProduct, Inspected
from quantkit.report.bundle import engine
from quantkit.report.bundle.harm import mixed as sections
from quantkit.report.bundle.harm import mixed_sentences as sentences
from report import labelled
from report.shown import page, printed
from report.timed import everything, judged

FALLEN = EngineProduct(
    linear="model.layers.0.mlp.down_proj",
    asked="int4",
    got="float16",
    layer="gemm_3",
    why="the product gemm_3 reads its weight in float16: the layer <expand> dequantizes it",
)
KEPT = [
    EngineProduct(linear=f"model.layers.{block}.self_attn.q_proj", asked="int4", got="int4", layer=f"gemm_{block}")
    for block in range(3)
]
SLOW = Costly(
    layer="gemm_3",
    kind="gemm",
    tactic="sm89_xmma_gemm_f16",
    linears=(FALLEN.linear,),
    seconds=2e-4,
    low=1.9e-4,
    high=3e-4,
    share=0.25,
    tried=(("sm89_xmma_gemm_f16", 2e-4), ("sm89_xmma_gemm_i8", 4e-4)),
)
FOUND = Inspected(
    engine="engine/sm89.engine",
    library="tensorrt 10.16",
    gpu="NVIDIA L4",
    layers=40,
    fused=12,
    nodes=130,
    reformats=("Reformatting CopyNode for Input Tensor 0 to gemm_3",),
    products=(FALLEN, *KEPT),
    costliest=(SLOW,),
)


def test_what_fell_back_comes_first_and_the_rest_by_kind() -> None:
    first, costs = engine.sections([FOUND])
    assert first.sentences[0].startswith(
        "1 of 4 quantized layers are multiplied in more bits than asked: model.layers.0.mlp"
    )
    assert "130 nodes became 40 layers, 12 fused." in first.sentences
    assert "Layers that only change a tensor's memory layout: 1." in first.sentences
    assert [row[0] for row in first.table.rows] == [FALLEN.linear, "q_proj, 3 of them"]
    assert costs.table.rows[0][1] == "25.0 %" and "sm89_xmma_gemm_i8" in costs.table.rows[0][-1]
    assert "times of the build" in costs.captions[-1]


def test_a_library_that_tries_nothing_says_so() -> None:
    plain = SLOW.model_copy(update={"tried": ()})
    found = FOUND.model_copy(update={"library": "tensorrt_rtx 1.7.1.116", "costliest": (plain,)})
    assert "it tries no kernels" in engine.sections([found])[1].captions[-1]


def test_the_page_has_it_and_escapes_it() -> None:
    html = page(judged(), everything(), [planted.NOTE], engines=[FOUND])
    assert "What the engine does" in html and "&lt;expand&gt;" in html
    assert "What the engine does" not in page(judged(), everything(), [planted.NOTE])


def test_the_terminal_names_what_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(engine.brief(FOUND), monkeypatch, 200)
    assert "✗ engine/sm89.engine" in text
    assert FALLEN.linear in text and "sm89_xmma_gemm_f16" in text
    kept = FOUND.model_copy(update={"products": tuple(KEPT), "costliest": ()})
    assert "✓ engine/sm89.engine: All named layers of 3 quantized layers" in printed(
        engine.brief(kept), monkeypatch, 200
    )


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
    assert len(layers.table.rows) == 12 and layers.table.rows[11][0] == NAMES[11]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Keeping 2 layers in high precision gives 0.200, for 5.0 % more bytes."),
        ({"chosen": 0, "limit": 1.0}, "That meets the gate, so no layer was kept in high precision."),
        ({"chosen": None, "limit": 0.001}, "No point of the curve meets the gate of 0.001."),
    ],
)
def test_what_it_says_follows_from_the_choice(changes: dict[str, Any], sentence: str) -> None:
    assert sentences(mixed(**changes)) == [
        "With no layer in high precision, KL, nats an image: 0.800 at 1.20 MB.",
        sentence,
    ]
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
    assert "Mixed precision" in text and "256 images of photos (tune)" in text
