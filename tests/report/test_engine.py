"""What an engine does, on the page and on screen."""

from __future__ import annotations

import planted
import pytest

from quantkit.measurement.engine_layers import Costly, EngineProduct, Inspected
from quantkit.report.bundle import engine
from report.shown import page, printed
from report.timed import everything, judged

FALLEN = EngineProduct(
    linear="model.layers.0.mlp.down_proj",
    asked="int4",
    got="float16",
    layer="gemm_3",
    why="the product gemm_3 reads its weight in float16: the layer <expand> expands it",
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
    assert first.said[0].startswith(
        "1 of 4 quantized layers are multiplied in more bits than asked: model.layers.0.mlp"
    )
    assert "130 nodes became 40 layers, 12 fused." in first.said
    assert "Layers that only change how a tensor lies: 1." in first.said
    assert [row[0] for row in first.table.rows] == [FALLEN.linear, "q_proj, 3 of them"]
    assert costs.table.rows[0][1] == "25.0 %"
    assert "sm89_xmma_gemm_i8" in costs.table.rows[0][-1]
    assert "as the build timed them" in costs.captions[-1]


def test_a_library_that_tries_nothing_says_so() -> None:
    plain = SLOW.model_copy(update={"tried": ()})
    found = FOUND.model_copy(update={"library": "tensorrt_rtx 1.7.1.116", "costliest": (plain,)})
    assert "no spread to show" in engine.sections([found])[1].captions[-1]


def test_the_page_has_it_and_escapes_it() -> None:
    html = page(judged(), everything(), [planted.NOTE], engines=[FOUND])
    assert "What the engine does" in html
    assert "&lt;expand&gt;" in html
    assert "What the engine does" not in page(judged(), everything(), [planted.NOTE])


def test_the_terminal_names_what_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(engine.brief(FOUND), monkeypatch, 200)
    assert "✗ engine/sm89.engine" in text
    assert FALLEN.linear in text and "sm89_xmma_gemm_f16" in text
    kept = FOUND.model_copy(update={"products": tuple(KEPT), "costliest": ()})
    assert "✓ engine/sm89.engine: All of 3 quantized layers" in printed(engine.brief(kept), monkeypatch, 200)
