"""`quantkit tax`: what is asked is checked whole, what is found is judged; times are planted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import planted_ops
import pytest
import zoo
from safetensors.torch import save_file

from quantkit import machine
from quantkit.bundle import Bundle, LayerEntry, content_sha256
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError
from quantkit.kernels.dispatch import Recorded, versions
from quantkit.measurement.operators import run as ops_run
from quantkit.pipeline.tax import BundleWays, Question, TaxAnswer, batch_range, judge, measure_tax, prepare, record
from quantkit.pipeline.tax_devices import Graphics
from quantkit.report.kit import words


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


def test_a_bundle_s_head_and_its_second_way_are_timed_and_summed(tmp_path: Path, planted_run: list[Any]) -> None:
    """Both ways of the blocks, and the head in its own: summed here from the planted rows."""

    def layer(name: str, group: int, shape: tuple[int, int]) -> LayerEntry:
        scheme = {"format": "int4", "granularity": "group", "group": group, "symmetric": False}
        return LayerEntry(name=name, shape=list(shape), scheme=scheme, bits_per_weight=4.5)

    layers = [layer(f"model.layers.{i}.mlp.up_proj", 64, (128, 64)) for i in range(3)]
    recipe = {"name": "x", "export": [{"onnx": {"prefill": "int8"}}]}
    manifest = planted.manifest(layers=[*layers, layer("lm_head", 32, (512, 64))], recipe=recipe)
    (tmp_path / MANIFEST).write_bytes(manifest.as_bytes())
    plan = prepare(Question(model=str(tmp_path), batches=[4, 64], threads=[2], seconds=1.0))
    assert list(plan.variants) == ["int4.g64.level4", "int4.g32.level4", "int8.token"]
    found = measure_tax(plan)

    def seconds(size: tuple[int, int], batch: int, variant: str) -> float:
        return next(
            row.value or 0.0
            for row in found.rows
            if row.name == "latency.op" and row.op is not None and (*size, batch) == (row.op.K, row.op.N, row.op.M)
            and row.settings["variant"] == variant
        )  # fmt: skip

    few, many = [note for note in found.notes if "as this bundle multiplies" in note]
    for note, batch, way in ((few, 4, "int4.g64.level4"), (many, 64, "int8.token")):
        head = seconds((64, 512), batch, "int4.g32.level4")
        total = 3 * seconds((64, 128), batch, way) + head
        assert note.startswith(f"batch {batch}, as this bundle multiplies ({way}): {words.moment(total)} of products")
        assert note.endswith(f"the head (64x512, int4.g32.level4) takes {words.percent(head / total, 0)}")


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
    assert "group must divide K; use int4 in groups of 32 or 64" in refused(
        "group-indivisible", formats=["int4.g128.level4"], **shape
    )
    assert "cpu-x86" not in refused("format-absent", formats=["int3"], **shape)
    assert "would not measure it; computed natively by" in refused("format-absent", formats=["mxfp4"], **shape)
    assert "did you mean 'int4.g32.level4'" in refused("unknown-format", formats=["int4.g32.lvl4"], **shape)
    assert "did you mean 'llama-3-8b'" in refused("unknown-model", model="llama-3-8")
    assert "no GPU here" in refused("device-absent", device="cuda", **shape)
    assert "no GPU here" in refused("device-absent", target="l4", **shape)
    assert "--device cuda" in refused("device-absent", target="l4", device="cpu", **shape)
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


def answered(**asked: Any) -> TaxAnswer:
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
    asked = replace(plan, ways=BundleWays("nf4.g64", None, "", ""))
    job = ops_run.SweepJob(
        [each.model_dump() for each in plan.shapes.linears], "", "float32", plan.variants, [1, 4], 1, 1.0
    )
    _, advice = judge(planted_ops.rows_of_a_run(job), asked)
    assert (advice.answer, advice.format) == ("use_instead", "int4.g128.level4")


def test_wrong_numbers_are_never_timed_silently(planted_run: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = planted_ops.FakeBench.prepare

    def wrong(self: Any, linear: Any, variants: Any, largest: int) -> Any:
        return {**real(self, linear, variants, largest), "nf4.g64": "wrong-result"}

    monkeypatch.setattr(planted_ops.FakeBench, "prepare", wrong)
    found = answered(formats=["int4", "nf4"], batches=[1], threads=[2])
    assert found.notes == ["not timed, because the runtime gave wrong numbers: nf4.g64"]
    assert [each.answer for each in found.verdicts[2]] == ["ship_it", "not_measured"]


def card(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H200", sm: str = "9.0") -> None:
    found = [{"name": name, "sm": sm, "memory": 10**11, "driver": "1"}]
    monkeypatch.setattr(machine, "gpus", lambda: (found, ""))


def test_on_a_gpu_its_target_baseline_and_formats_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")  # Linux alone has it
    card(monkeypatch)
    plan = prepare(Question(model="llama-3-8b", device="cuda"))
    assert (plan.on.target.name, plan.on.baseline, plan.on.runtime, plan.threads) == ("h200", "bfloat16", "torch", [0])
    assert plan.variants == ["int4.g128", "int8.dynamic", "fp8_e4m3.dynamic", "nf4.g64.double"]
    # the target is a GPU, so is the device
    assert prepare(Question(model="llama-3-8b", target="h200")).on.baseline == "bfloat16"
    assert prepare(Question(shapes=["96x64"], device="cuda", formats=["int4"])).variants == ["int4.g32"]
    assert "int8.dynamic.torch" in prepare(Question(shapes=["128x64"], device="cuda", formats=["all"])).variants
    shape = {"shapes": ["192x64"], "device": "cuda"}
    refused("group-indivisible", formats=["int4.g128"], **shape)
    assert "would not measure it" in refused("format-absent", formats=["mxfp8"], **shape)
    refused("group-indivisible", formats=["fp8_e4m3.b128.dynamic"], **shape)
    refused("usage", threads=[2], **shape)
    refused("device-absent", target="cpu-x86", **shape)
    refused("device-absent", target="l4", **shape)
    refused("runtime-unsupported", runtime="onnxruntime", **shape)


def test_an_older_card_lacks_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    card(monkeypatch, "NVIDIA A100-SXM4-80GB", "8.0")
    plan = prepare(Question(shapes=["128x64"], device="cuda"))
    assert plan.on.target.name == "a100"
    assert "fp8_e4m3.dynamic" not in plan.variants
    line = refused("device-lacks-format", shapes=["128x64"], device="cuda", formats=["fp8_e4m3.dynamic"])
    assert "Ada, Hopper" in line
    card(monkeypatch, "NVIDIA L40S", "8.9")
    assert "l4" in refused("target-unknown", shapes=["128x64"], device="cuda")
    assert prepare(Question(shapes=["128x64"], device="cuda", target="l4")).on.target.name == "l4"
    card(monkeypatch, "Tesla V100-SXM2-16GB", "7.0")
    refused("device-unsupported", shapes=["128x64"], device="cuda")


@pytest.mark.parametrize(
    ("scheme", "activations", "variant"),
    [
        ({"format": "int4", "granularity": "group", "group": 64, "symmetric": False}, None, "int4.g64.zeros"),
        ({"format": "int4", "granularity": "channel"}, None, "int4.channel"),
        ({"format": "nf4", "granularity": "group", "group": 64, "scale": "double"}, None, "nf4.g64.double"),
        ({"format": "int8", "granularity": "channel"}, {"dynamic": True, "granularity": "token"}, "int8.dynamic"),
        ({"format": "int8", "granularity": "channel"}, {"dynamic": False, "granularity": "tensor"}, "int8"),
        ({"format": "fp8_e4m3", "granularity": "channel"}, None, "fp8_e4m3"),
        ({"format": "int3", "granularity": "group", "group": 64}, None, "int3"),
        ({"format": "nvfp4", "granularity": "group", "group": 16}, None, "nvfp4"),
        (
            {"format": "int4", "granularity": "group", "group": 128, "symmetric": True},
            {"format": "fp8_e4m3", "dynamic": True, "granularity": "token"},
            "int4.g128.fp8",
        ),
    ],
)
def test_a_bundles_scheme_is_a_variant_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, scheme: Any, activations: Any, variant: str
) -> None:
    pytest.importorskip("triton")
    card(monkeypatch)
    assert Graphics.of(None).own(scheme, activations) == variant


def test_choices_of_a_gpu_go_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted_run: list[Any]
) -> None:
    pytest.importorskip("triton")
    card(monkeypatch)
    made = planted.manifest()
    made = made.model_copy(update={"content_sha256": content_sha256(made.files)})
    (tmp_path / MANIFEST).write_bytes(made.as_bytes())
    asked = Question(model=str(tmp_path), device="cuda", batches=[1, 8], seconds=1.0)
    assert prepare(asked).variants == [own := prepare(asked).subject]
    with monkeypatch.context() as there:
        there.setattr(machine, "has", lambda package: True)
        assert prepare(asked).variants == [own, f"{own}.humming"], "the other packing of the same weights"
    found = measure_tax(prepare(asked))
    assert not found.plan.records or found.plan.subject.startswith("int4.g")
    record(found)
    kept = Recorded.of((tmp_path / "kernels.json").read_bytes())
    assert kept.device["name"] == "NVIDIA H200"
    assert kept.variant == found.plan.subject
    assert kept.versions["kernels"] == versions()["kernels"]
    linear = found.plan.shapes.linears[0]
    choice = kept.table.choose((linear.N, linear.K), 8)
    assert (choice.candidate, choice.config) == ("quantkit", {"block_n": 64, "block_m": 16})
    assert [each.path for each in Bundle.load(tmp_path).manifest.files if each.role == "kernels"] == ["kernels.json"]
    with pytest.raises(InputError, match="dispatch-invalid"):
        Recorded.of(b"[]")
