"""The timing cache of builds: what it saves, and what survives a build that ends badly.

The library is a fake one (`fake_build/tensorrt.py`); what is killed, and what meets, is a process of its own.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.exporters.tensorrt import engine as _engine
from quantkit.exporters.tensorrt import timings
from quantkit.exporters.tensorrt.timings import Tactics, of

pytestmark = pytest.mark.usefixtures("fake_builder")


def job(folder: Path, *lines: str, name: str = "one", **more: Any) -> _engine.EngineJob:
    network = folder / f"{name}.onnx"
    network.write_text("\n".join(lines))
    fields: dict[str, Any] = {"sm": ["8.9"], "gpu": "a GPU", "profiles": [], "workspace": 1.0, "optimization_level": 3}
    fields |= {"timing_cache": str(folder / "t.cache"), **more}
    return _engine.EngineJob(network=str(network), engine=str(folder / f"{name}.engine"), library="tensorrt", **fields)


def build(folder: Path, *lines: str, **more: Any) -> _engine.Built:
    return _engine._built(job(folder, *lines, **more), lambda share, words: None)


def known(folder: Path) -> list[str]:
    return list(json.loads((folder / "t.cache").read_bytes()))


def test_the_second_build_says_what_the_first_one_has_saved_it(tmp_path: Path) -> None:
    layers = [f"layer {number}" for number in range(6)]
    first = build(tmp_path, *layers)
    assert (first.cache_hit, first.first_seconds, first.saved_seconds) == (False, None, None)
    again = build(tmp_path, *layers)
    assert again.cache_hit and again.first_seconds == first.seconds
    assert again.saved_seconds == pytest.approx(first.seconds - again.seconds)
    assert again.saved_seconds is not None and again.saved_seconds > 0
    said = timings.said(again.model_dump())
    assert f"the timing cache saved {again.saved_seconds:.1f} s" in said
    # of another network that shares layers nobody knows how long it would have taken
    other = build(tmp_path, *layers, "one more", name="two")
    assert (other.cache_hit, other.saved_seconds) == (True, None)
    assert "the saved time is unknown" in timings.said(other.model_dump())
    # a cache that is damaged is begun anew, and what was noted of it holds no longer
    (tmp_path / "t.cache").write_bytes(b"{")
    anew = build(tmp_path, *layers)
    assert (anew.cache_hit, anew.saved_seconds) == (False, None)
    assert known(tmp_path) == layers


@pytest.mark.parametrize(("keep_every", "kept"), [(0.0, ["a", "b", "old"]), (3600.0, ["old"])])
def test_a_build_that_is_killed_leaves_what_was_written(tmp_path: Path, keep_every: float, kept: list[str]) -> None:
    build(tmp_path, "old")
    with pytest.raises(InputError, match="build-failed") as caught:
        _engine.build(job(tmp_path, "a", "b", "kill", name="two", keep_every=keep_every))
    assert "SIGKILL" in str(caught.value.value)
    assert known(tmp_path) == kept
    assert not (tmp_path / "two.engine").exists()


def test_a_build_that_fails_or_runs_out_of_time_keeps_what_it_has_timed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="out of memory"):
        build(tmp_path, "a", "fail out of memory")
    assert known(tmp_path) == ["a"]
    with pytest.raises(InputError, match="timeout"):
        build(tmp_path, "a", "b", *(f"layer {number}" for number in range(99)), seconds=0.02)
    assert known(tmp_path)[:2] == ["a", "b"]
    assert len(known(tmp_path)) < 99


def test_two_builds_that_share_a_cache_add_to_it_both(tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    built: list[_engine.Built] = []

    def run(name: str) -> None:
        # both have read the cache before one of them writes
        lines = [f"wait {tmp_path / 'met'} 2", f"{name} 1", f"{name} 2"]
        built.append(_engine.build(job(tmp_path, *lines, name=name, keep_every=0.0)))

    both = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert [each.cache_hit for each in built] == [False, False]
    assert known(tmp_path) == ["one 1", "one 2", "two 1", "two 2"]
    assert len(json.loads((tmp_path / "t.json").read_bytes())) == 2
    again = build(tmp_path, *(tmp_path / "one.onnx").read_text().splitlines(), name="one")
    assert again.cache_hit and again.first_seconds is not None


def test_a_cache_that_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = build(tmp_path, "a", timing_cache=str(tmp_path / "file" / "t.cache"))
    assert made.bytes and "could not be written" in timings.said(made.model_dump())


def test_ahead_of_time_there_is_none() -> None:
    assert timings.said({"seconds": 3.0, "cache_hit": None}) == ""


# kernels that TensorRT tried, from lines of its log as builds of version 8.4 and 10 have been published
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
