"""What runs in integers, read off graphs made by hand."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from quantkit.graph.integer import QuantizedSite, found

TEXT = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[M,4] x, uint8[M,4] q) => (float[M,3] a, float[M,3] b, float[M,3] c)
<float scale = {0.5}, uint8 zero = {128}, uint8[4,3] wa = {0,0,0,0,0,0,0,0,0,0,0,0},
 uint8[4,3] wb = {0,0,0,0,0,0,0,0,0,0,0,0}, uint8[4,3] wc_turned = {0,0,0,0,0,0,0,0,0,0,0,0}>
{
    a = com.microsoft.MatMulIntegerToFloat(q, wa, scale, scale, zero, zero)
    dense = DequantizeLinear(wb, scale, zero)
    b = MatMul(x, dense)
    sums = MatMulInteger(q, wc_turned, zero, zero)
    c = Cast <to = 1> (sums)
}
"""


def test_sites_are_found_by_their_codes() -> None:
    model = ir.from_onnx_text(TEXT)
    sites = [
        QuantizedSite("first", "wa", 6),
        QuantizedSite("second", "wb", 3),
        QuantizedSite("third", "wc", 1),
        QuantizedSite("fourth", "gone", 2),
    ]
    result = found(model, sites)
    assert result.share == pytest.approx(7 / 12)
    assert result.floating == {"second": "MatMul", "fourth": "no operator that reads its weight"}
    assert result.kernels == {"MatMulIntegerToFloat": 1, "MatMulInteger": 1}


def test_a_site_whose_codes_were_renamed_is_found_by_what_it_makes() -> None:
    result = found(
        ir.from_onnx_text(TEXT), [QuantizedSite("first", "other", 1, "a"), QuantizedSite("second", "other", 1, "b")]
    )
    assert (result.share, result.floating) == (0.5, {"second": "MatMul"})


def test_a_name_that_begins_alike_is_another_tensor() -> None:
    assert found(ir.from_onnx_text(TEXT.replace("wc_turned", "wc2")), [QuantizedSite("third", "wc", 1)]).share == 0


def test_nothing_to_find_is_all() -> None:
    assert found(ir.from_onnx_text(TEXT), []).share == 1
