"""`quantkit tax`: what is asked is checked whole, what is found is judged; times are planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planted
import planted_ops
import pytest
import zoo
from safetensors.torch import save_file

from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError
from quantkit.measure import ops_run
from quantkit.pipeline.tax import Answer, judge, measure_tax
from quantkit.pipeline.tax_question import Question, batch_range, prepare, traffic_of


def refused(code: str, **asked: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepare(Question(**asked))
    assert caught.value.code == code
    assert "\n" not in caught.value.line()
    return caught.value.line()


def test_ranges_double_and_lists_are_taken_as_they_are() -> None:
    assert batch_range("1:64") == [1, 2, 4, 8, 16, 32, 64]
    assert batch_range("1:100") == [1, 2, 4, 8, 16, 32, 64, 100]
    assert batch_range("8,1, 64") == [1, 8, 64]
    assert batch_range("1:4,512:1024") == [1, 2, 4, 512, 1024]
    assert batch_range("1:4096")[-1] == 4096
    for text in ("0", "1:0", "0:8", "8:1", "", "1,,2", "a", "1:2:3", "-1", "1.5"):
        with pytest.raises(InputError, match="--batch"):
            batch_range(text)


def test_shares_of_the_traffic_add_up_to_one_or_are_refused() -> None:
    assert traffic_of("1:0.7,8:0.2,64:0.1") == {1: 0.7, 8: 0.2, 64: 0.1}
    with pytest.raises(InputError, match=r"add up to 100;.*--traffic 1:0\.7,8:0\.3"):
        traffic_of("1:70,8:30")
    for text in ("1", "1:", "0:1", "1:-1,2:2", "1:0.5,1:0.5", "1:nan", "a:1", "", "1:0"):
        with pytest.raises(InputError, match="traffic-invalid"):
            traffic_of(text)


def test_where_shapes_come_from(tmp_path: Path) -> None:
    assert prepare(Question(shapes=["64x32"])).shapes.name == ""
    shipped = prepare(Question(model="smollm2-135m"))
    assert shipped.shapes.name == "smollm2-135m"
    folder = tmp_path / "tiny"
    zoo.tiny("llama", vocab_size=64).config.save_pretrained(folder)
    by_config = prepare(Question(model=str(folder), formats=["int8.dynamic"])).shapes
    model = zoo.tiny("llama", vocab_size=64)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    by_weights = prepare(Question(model=str(folder), formats=["int8.dynamic"])).shapes

    def sizes(found: Any) -> Any:
        return sorted((each.K, each.N, each.count) for each in found.distinct())

    assert sizes(by_config) == sizes(by_weights)
    assert by_config.name == by_weights.name == "tiny"
    assert "stored weights" in by_weights.source
    assert prepare(Question(model=str(folder / "config.json"), formats=["int8.dynamic"])).shapes.linears


def test_a_bundle_is_asked_about_in_its_own_format(tmp_path: Path) -> None:
    manifest = planted.manifest()
    (tmp_path / MANIFEST).write_bytes(manifest.as_bytes())
    plan = prepare(Question(model=str(tmp_path), formats=["int8.dynamic"]))
    assert plan.subject.startswith("int4.g")
    assert list(plan.variants) == [plan.subject, "int8.dynamic"]
    assert sum(each.count for each in plan.shapes.linears) == len(manifest.layers)


def test_formats_become_what_quantkit_exports_in_groups_that_fit() -> None:
    assert prepare(Question(shapes=["256x32"], formats=["int4", "nf4"])).variants == ["int4.g128.level4", "nf4.g64"]
    assert prepare(Question(model="smollm2-135m", formats=["int4"])).variants == ["int4.g64.level4"]
    some = prepare(Question(shapes=["64x32"], formats=["int4*"])).variants
    assert "int4.g32.level0" in some
    assert not [name for name in some if "g128" in name], "a pattern takes what fits"
    every = prepare(Question(shapes=["128x32"], formats=["all"])).variants
    assert {"float16", "int8.static", "int4.qdq", "int4.qdq-transposed", "fp8_e4m3"} <= set(every)
    assert "float32" not in every


def test_batches_are_the_targets_or_the_traffics() -> None:
    assert prepare(Question(shapes=["64x32"])).batches == [1, 2, 4, 8, 16, 32, 64]
    assert prepare(Question(shapes=["64x32"], traffic={1: 0.5, 9: 0.5})).batches == [1, 9]
    assert prepare(Question(shapes=["64x32"], batches=[4], traffic={1: 1.0})).batches == [1, 4]


def test_what_cannot_be_timed_is_one_line(tmp_path: Path) -> None:
    shape = {"shapes": ["64x32"]}
    assert "group divides K; use int4 in groups of 32 or 64" in refused(
        "group-indivisible", formats=["int4.g128.level4"], **shape
    )
    assert "h200" not in refused("format-absent", formats=["int3"], **shape)
    assert "would not measure it; computed natively by" in refused("format-absent", formats=["mxfp4"], **shape)
    assert "did you mean 'int4.g32.level4'" in refused("unknown-format", formats=["int4.g32.lvl4"], **shape)
    assert "did you mean 'llama-3-8b'" in refused("unknown-model", model="llama-3-8")
    assert "benchmarks/gpu" in refused("device-absent", device="cuda", **shape)
    assert "--target" in refused("device-absent", target="l4", **shape)
    refused("unknown-device", device="tpu", **shape)
    refused("runtime-unsupported", runtime="torch", **shape)
    refused("threads-invalid", threads=[4096], **shape)
    refused("threads-invalid", threads=[0], **shape)
    refused("usage")
    refused("usage", model="llama-3-8b", **shape)
    refused("usage", batches=[0], **shape)
    refused("usage", formats=["float32"], **shape)
    refused("unknown-variant", formats=["int9*"], **shape)
    refused("model-remote", model="hf:org/name")
    refused("file-missing", model=str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    refused("config-invalid", model=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    refused("config-unknown", model=str(tmp_path))


@pytest.fixture
def planted_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    jobs: list[Any] = []

    def run(job: Any, progress: Any = None) -> Any:
        jobs.append(job)
        if progress:
            progress(0.5, "half")
        return planted_ops.rows_of_a_run(job)

    monkeypatch.setattr(ops_run, "run", run)
    return jobs


def answered(**asked: Any) -> Answer:
    return measure_tax(prepare(Question(**{"shapes": ["256x64"], "seconds": 1.0, **asked})))


def test_each_format_is_judged_and_the_best_is_named(planted_run: list[Any]) -> None:
    found = answered(formats=["nf4", "int4"], batches=[1, 4, 64], threads=[2])
    assert [(each.format, each.answer) for each in found.verdicts[2]] == [
        ("nf4.g64", "do_not_quantize"),
        ("int4.g128.level4", "ship_up_to"),
    ]
    advice = found.advice[2]
    assert (advice.format, advice.answer, advice.batch) == ("int4.g128.level4", "ship_up_to", 4)
    assert not found.inconclusive
    result = found.as_dict()
    assert result["advice"][0]["threads"] == 2
    assert json.dumps(result, allow_nan=False)


def test_the_traffic_says_which_batches_matter(planted_run: list[Any]) -> None:
    found = answered(formats=["int4"], traffic={1: 0.9, 4: 0.1}, threads=[2])
    assert found.advice[2].answer == "ship_it"
    assert found.advice[2].because[0].startswith("over the traffic")


def test_each_number_of_threads_has_a_run_of_its_own(planted_run: list[Any]) -> None:
    plan = prepare(Question(shapes=["256x64"], formats=["int4"], batches=[1], seconds=10.0, threads=[1]))
    seen: list[Any] = []
    measure_tax(plan, lambda share, words: seen.append((share, words)))
    assert [(job.threads, job.seconds, job.model) for job in planted_run] == [(1, 10.0, "")]
    assert seen == [(0.5, "half")]


def test_a_model_is_judged_by_the_sum_of_its_linears(planted_run: list[Any]) -> None:
    found = answered(shapes=(), model="vit-b-16", formats=["int4"], batches=[1, 64], threads=[2])
    assert planted_run[0].model == "vit-b-16"
    assert len(planted_run[0].linears) == 4
    assert "all linears" in found.advice[2].because[0]
    sums = [row for row in found.rows if row.op and row.op.layer == "all linears" and row.name == "latency.op"]
    assert {row.settings["linears"] for row in sums} == {73}


def test_a_bundle_whose_format_loses_is_told_what_to_use() -> None:
    plan = prepare(Question(shapes=["256x64"], formats=["nf4", "int4"], batches=[1, 4], threads=[1]))
    asked = type(plan)(**{**plan.__dict__, "subject": "nf4.g64"})
    job = ops_run.Job([each.model_dump() for each in plan.shapes.linears], "", "float32", plan.variants, [1, 4], 1, 1.0)
    _, advice = judge(planted_ops.rows_of_a_run(job), asked)
    assert (advice.answer, advice.format) == ("use_instead", "int4.g128.level4")


def test_wrong_numbers_are_never_timed_silently(planted_run: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = planted_ops.FakeBench.prepare

    def wrong(self: Any, linear: Any, variants: Any, largest: int) -> Any:
        return {**real(self, linear, variants, largest), "nf4.g64": "wrong-result"}

    monkeypatch.setattr(planted_ops.FakeBench, "prepare", wrong)
    found = answered(formats=["int4", "nf4"], batches=[1], threads=[2])
    assert found.notes == ["not timed, because ONNX Runtime gave wrong numbers: nf4.g64"]
    assert [each.answer for each in found.verdicts[2]] == ["ship_it", "not_measured"]
