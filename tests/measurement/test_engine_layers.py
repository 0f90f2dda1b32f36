"""Inspector output as NVIDIA documents it, in the words of TensorRT 10 and of 11, mapped back to a model's layers.

No engine can be opened without a GPU, so the layers are made up; keys, types and separators are those of the pages
that `measurement/engine_layers.py` names and of NVIDIA's own reader of them (trt-samples-for-hackathon-cn, engine
visualizer).
"""

from typing import Any

import pytest

from quantkit.bundle import LayerEntry
from quantkit.errors import InputError
from quantkit.measurement.engine_layers import Inspected, costliest, inspected, parse, type_of

INT4 = {"format": "int4", "granularity": "group", "group": 64, "symmetric": True}
INT8 = {"format": "int8", "granularity": "channel", "symmetric": True}
STATIC = {"format": "int8", "granularity": "tensor", "dynamic": False}


def tensor(name: str, kind: str, version: int) -> dict[str, Any]:
    if version == 10:
        words = {"Half": "Row major linear FP16 format", "Int8": "Row major linear INT8 format"}
        return {"Name": name, "Dimensions": [1, 64], "Format/Datatype": words.get(kind, kind)}
    return {"Name": name, "Dimensions": [1, 64], "Format": "Row major linear format (kLINEAR)", "Datatype": kind}


def layer(
    name: str, kind: str, nodes: list[str], types: list[str], *, out: str = "Half", version: int = 11
) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": [tensor(f"{name}_{place}", each, version) for place, each in enumerate(types)],
        "Outputs": [tensor(f"{name}_out", out, version)],
        "TacticName": f"{kind}_tactic",
        "StreamId": 0,
        "Metadata": "\x1f".join(f"[ONNX Layer: {node}]" for node in nodes),
    }


def entry(name: str, scheme: dict[str, Any], inputs: dict[str, Any] | None = None) -> LayerEntry:
    return LayerEntry(name=name, shape=[64, 64], scheme=scheme, bits_per_weight=4.25, activations=inputs)


def look(layers: list[Any], linears: list[LayerEntry], **more: Any) -> Inspected:
    about = {"engine": "engine/sm89.engine", "library": "tensorrt_rtx 1.7.1.116", "gpu": "NVIDIA L4"}
    return inspected({"Layers": layers}, linears, **about, **more)


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize(
    ("scheme", "nodes", "types", "got"),
    [
        # the DequantizeLinear of its own weight is in the product's layer: codes are read, whatever else the types say
        (INT4, ["a.q.values", "a.q/output"], ["Half", "Half"], "int4"),
        (INT8, ["a.q.values", "a.q/output"], ["Half", "Half"], "int8"),
        # or what goes in has the type of the codes
        (INT4, ["a.q/output"], ["Half", "Int4"], "int4"),
        # another weight's node, or another type, says nothing of it
        (INT4, ["a.k.values", "a.q/output"], ["Half", "Half"], "float16"),
        (INT4, ["a.q/output"], ["Half", "Int8"], "float16"),
    ],
)
def test_codes_are_read_where_the_weight_s_node_or_its_type_is(
    scheme: dict[str, Any], nodes: list[str], types: list[str], got: str, version: int
) -> None:
    if version == 10 and "Int4" in types:
        types = ["Half", "Row major linear INT4 format"]
    found = look([layer("q", "gemm", nodes, types, version=version)], [entry("a.q", scheme)])
    assert found.products[0].got == got
    assert found.products[0].fell_back == (got == "float16") == (not found.check.ok)
    assert (found.decisions() == []) == (got != "float16")
    assert (found.fused, found.nodes) == (int(len(nodes) > 1), len(nodes))


@pytest.mark.parametrize("version", [10, 11])
def test_a_weight_that_another_layer_expands_is_16_bit(version: int) -> None:
    layers = [
        layer("expand", "kgen", ["a.q.values"], ["Int4", "Half"], version=version),
        layer("q", "gemm", ["a.q/output"], ["Half", "Half"], version=version),
    ]
    found = look(layers, [entry("a.q", INT4)])
    (product,) = found.products
    assert product.fell_back and product.got == "float16"
    assert "the layer expand dequantizes it" in product.why
    assert not found.check.ok and found.check.value == 1 and found.check.where == "a.q"
    (taken,) = found.decisions()
    assert (taken.code, taken.where, taken.from_, taken.to) == ("precision-fallback", "a.q", "int4", "float16")


def test_a_weight_that_was_folded_is_16_bit() -> None:
    found = look([layer("q", "gemm", ["a.q/output"], ["Half", "Half"])], [entry("a.q", INT4)])
    assert found.products[0].fell_back
    assert "folded into floats" in found.products[0].why


def test_one_profile_that_falls_back_counts() -> None:
    layers = [
        layer("q", "gemm", ["a.q.values", "a.q/output"], ["Half"]),
        layer("expand [profile 1]", "kgen", ["a.q.values"], ["Int4"]),
        layer("q [profile 1]", "gemm", ["a.q/output"], ["Half", "Half"]),
    ]
    found = look(layers, [entry("a.q", INT4)])
    assert found.products[0].fell_back
    assert "expand [profile 1]" in found.products[0].why


def test_pairs_that_no_product_consumes() -> None:
    weights = ["a.q.values", "a.q/output"]
    good = [
        layer("quantize", "kgen", ["a.norm", "a.q/input.codes"], ["Half"], out="Int8"),
        layer("q", "gemm", ["a.q/input.values", *weights], ["Int8", "Half"]),
    ]
    found = look(good, [entry("a.q", INT8, STATIC)])
    assert found.products[0].inputs_got == "int8" and found.pairs == () and found.check.ok
    bad = [
        layer("round", "kgen", ["a.q/input.codes", "a.q/input.values"], ["Half"]),
        layer("q", "gemm", weights, ["Half", "Half"]),
    ]
    found = look(bad, [entry("a.q", INT8, STATIC)])
    assert found.pairs == ("a.q/input.values",)
    assert found.products[0].inputs_got == "float16" and found.products[0].got == "int8"
    assert not found.check.ok
    assert "no kernel uses the Q/DQ pair before it" in found.decisions()[0].reason


def test_what_the_engine_does_not_name_is_said_to_be_unknown() -> None:
    found = look([layer("all", "myelin", ["x"], ["Half"])], [entry("a.q", INT4), entry("a.k", INT4)])
    assert [each.got for each in found.products] == [None, None]
    assert found.check.ok
    (note,) = found.decisions()
    assert note.code == "note" and "2 layers are not named" in note.reason


def test_reformats_are_listed() -> None:
    layers = [
        {**layer("Reformatting CopyNode for Input Tensor 0 to q", "NoOp", [], ["Half"])},
        layer("x", "Reformat", [], ["Float"]),
        layer("q", "gemm", [], ["Half"]),
    ]
    assert look(layers, []).reformats == ("Reformatting CopyNode for Input Tensor 0 to q", "x")


@pytest.mark.parametrize("information", [{}, {"Layers": []}, {"Layers": ["q", "k"]}])
def test_an_engine_without_details_says_so(information: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="engine-opaque"):
        parse(information)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("Row major linear FP32 format (kLINEAR)", "float32"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("FP8", "fp8"),
        ("Int4", "int4"),
        ("N/A due to dynamic shapes", ""),
    ],
)
def test_types_by_the_library_s_words(words: str, wanted: str) -> None:
    assert type_of(words) == wanted


def test_the_costliest_with_their_spread_and_what_was_tried() -> None:
    layers = parse({"Layers": [layer(f"l{place}", "gemm", [f"a.{place}/output"], ["Half"]) for place in range(12)]})
    times = {f"l{place}": [1e-3 * place, 3e-3 * place, 2e-3 * place] for place in range(12)}
    found = costliest(layers, times, {"l11": [("fast", 0.01), ("slow", 0.02)]})
    assert [each.layer for each in found] == [f"l{place}" for place in range(11, 1, -1)]
    first = found[0]
    assert (first.seconds, first.low, first.high) == pytest.approx((0.022, 0.011, 0.033))
    assert first.share == pytest.approx(11 / 66)
    assert first.linears == ("a.11",)
    assert first.tried == (("fast", 0.01), ("slow", 0.02))
