"""Kernels that TensorRT tried, from lines of its log as builds of version 8.4 and 10 have been published."""

from __future__ import annotations

import pytest

from quantkit.exporters.tensorrt.timings import Tactics, of

LOG = """\
*************** Autotuning Reformat: Float(1,1,1) -> Float(1:4,1,1) ***************
--------------- Timing Runner: Optimizer Reformat(<in> -> (Unnamed Layer* 689) [Shuffle]_output) (Reformat)
Tactic: 0x00000000000003e8 Time: 90.5
Fastest Tactic: 0x00000000000003e8 Time: 90.5
*************** Autotuning format combination: Float(1000,1,1,1) -> Float(1000,1,1,1) ***************
--------------- Timing Runner: prob (CudaSoftMax)
Tactic: 0x00000000000003ea Time: 0.00364102
Fastest Tactic: 0x00000000000003ea Time: 0.00364102
--------------- Timing Runner: prob (CaskSoftMax)
CaskSoftMax has no valid tactics for this config, skipping
>>>>>>>>>>>>>>> Chose Runner Type: CudaSoftMax Tactic: 0x00000000000003ea
--------------- Timing Runner: loss3/classifier (CaskGemmConvolution)
loss3/classifier Set Tactic Name: turing_h1688cudnn_256x64_sliced1x2 Tactic: 0x105f56cf03ee5549
Tactic: 0x105f56cf03ee5549 Time: 0.0241811
Tactic: 0xc399fdbffdc34032 Time: inf
--------------- Timing Runner: a.q_proj/output (MatrixMultiply[0x80000013])
Tactic Name: sm89_xmma_gemm_i8, Tactic: 0x0000000000000001 Time: 0.5
Tactic Name: sm89_xmma_gemm_f16, Tactic: 0x0000000000000002 Time: 0.25
Tactic Name: sm89_xmma_gemm_f16, Tactic: 0x0000000000000002 Time: 0.75
"""


def test_layers_with_all_that_was_tried() -> None:
    tactics = Tactics()
    for line in LOG.splitlines():
        tactics.hear(line)
    product, classifier, softmax = tactics.timed()
    assert product.layer == "a.q_proj/output"
    assert [(each.name, each.seconds) for each in product.tried] == [
        ("sm89_xmma_gemm_f16", pytest.approx(2.5e-4)),
        ("sm89_xmma_gemm_i8", pytest.approx(5e-4)),
    ]
    assert product.spread == pytest.approx(2)
    assert [each.name for each in classifier.tried] == ["turing_h1688cudnn_256x64_sliced1x2"]
    assert softmax.tried[0].name == "CudaSoftMax 0x00000000000003ea"
    assert [each.layer for each in tactics.timed(1)] == ["a.q_proj/output"]
    assert of([product.model_dump(mode="json")]) == [product]


def test_other_lines_are_passed_over() -> None:
    tactics = Tactics()
    for line in ("Tactic: 0x01 Time: 3", "", "[MemUsageChange] Init CUDA: CPU +1, GPU +0", "Timing Runner: x (y)"):
        tactics.hear(line)
    assert tactics.timed() == []
    assert of(None) == []
