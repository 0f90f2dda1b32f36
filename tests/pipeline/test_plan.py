"""A plan from a config alone: what fits, what is refused, what is said to be assumed."""

import json

import forked
import pytest

from quantkit.errors import InputError
from quantkit.pipeline.plan import PlanQuestion, plan

pytestmark = pytest.mark.usefixtures("own_cache")

LABELS = ("bf16", "fp8", "awq-int4")


def test_formats_and_recipes_side_by_side() -> None:
    found = plan(PlanQuestion("llama-3-8b", LABELS, "h100", batches=(1, 256), prompt=1000, output=200))
    floats, eight, four = found.candidates
    assert [each.recipe for each in found.candidates] == ["float", "fp8", "awq-int4"]
    # codes of 4 bits, and a scale of 16 and a zero point of 4 for each 64 weights
    assert floats.bits is None
    assert [eight.bits, four.bits] == [pytest.approx(8.003, abs=1e-3), pytest.approx(4.3125, abs=1e-3)]
    small, large = ([each.rows[i].step.least for each in found.candidates] for i in (0, 1))
    assert small[2] < small[1] < small[0]  # type: ignore[operator]
    # at 256 rows weights are few of the bytes, and 4-bit weights are still multiplied in 16 bits
    assert large[2] > large[1]  # type: ignore[operator]
    assert found.recommendation.label == "fp8"
    assert floats.memory is not None and floats.memory.cache_per_token == 128 * 1024
    assert {cell.what: cell.state for cell in eight.cells} == {
        "fp8_e4m3 weights": "native",
        "fp8_e4m3 inputs": "native",
    }
    assert four.runtime == "vllm"


def test_what_an_override_stores_has_a_cell_too() -> None:
    wide = ["overrides=[{match: lm_head, weights: {format: int8, symmetric: true}}]"]
    cells = plan(PlanQuestion("smollm2-135m", ("int4-cpu",), "cpu-x86", changes=wide)).candidates[0].cells
    assert [(cell.format, cell.state) for cell in cells] == [("int4", "native"), ("int8", "native")]


def test_what_a_runtime_needs_beside_itself_is_noted() -> None:
    def noted(runtime: str) -> list[str]:
        found = plan(PlanQuestion("llama-3-8b", ("nf4",), "l4", runtime=runtime)).candidates[0]
        return [note for note in found.notes if "vllm-bnb-plugin" in note]

    assert len(noted("vllm")) == 1
    assert noted("torch") == []


def test_experts_that_a_runtime_does_not_multiply_are_refused() -> None:
    with pytest.raises(InputError, match="No WNA16 MoE backend") as caught:
        plan(PlanQuestion("mixtral-8x7b", ("int4-symmetric",), "cpu-x86", runtime="vllm"))
    assert caught.value.code == "target-cannot-run" and "experts in int4" in str(caught.value.value)


def test_a_format_stands_for_a_recipe_that_the_target_runs() -> None:
    of = {
        name: plan(PlanQuestion("llama-3-8b", ("int4", "bf16"), name)).candidates[0] for name in ("h100", "jetson-orin")
    }
    assert (of["h100"].recipe, of["h100"].runtime) == ("awq-int4", "vllm")
    # TensorRT takes no zero points
    assert (of["jetson-orin"].recipe, of["jetson-orin"].runtime) == ("int4-tensorrt", "tensorrt")


def test_a_model_that_fits_in_4_bits_alone() -> None:
    """Llama 3, 70B: 141 GB in 16 bits and 40 in 4, on a card of 80."""
    found = plan(PlanQuestion("llama-3-70b", ("bf16", "int4"), "h100", batches=(1,), devices=1))
    floats, four = found.candidates
    assert floats.bytes == pytest.approx(141e9, rel=0.01)
    assert (floats.rows[0].fits, four.rows[0].fits) == (False, True)
    assert floats.memory is not None and four.memory is not None
    assert (floats.memory.needed, four.memory.needed) == (2, 1)
    assert found.recommendation.label == "int4"
    # unless it is said, as many devices are planned for as hold it
    assert plan(PlanQuestion("llama-3-70b", ("bf16", "int4"), "h100")).candidates[0].memory.devices == 2  # type: ignore[union-attr]


def test_the_largest_batch_that_fits_is_planned_where_those_asked_for_do_not() -> None:
    (floats,) = plan(PlanQuestion("llama-3-70b", ("bf16",), "h100", batches=(1, 64), devices=2)).candidates
    most = floats.memory.largest_batch if floats.memory is not None else None
    assert [(row.batch, row.fits) for row in floats.rows] == [(1, True), (most, True), (64, False)]


def test_a_load_is_simulated_and_priced() -> None:
    calm, busy = (plan(PlanQuestion("llama-3-8b", ("fp8", "bf16"), "h100", rate=rate)) for rate in (1.0, 1000.0))
    load, late = calm.candidates[0].load, busy.candidates[0].load
    assert load is not None and late is not None
    assert load.stable and load.ttft["p50"].value <= load.ttft["p99"].value
    assert not late.stable
    assert any("none sustains 1000 requests a second" in reason for reason in busy.recommendation.because)
    whole = plan(PlanQuestion("llama-3-8b", ("fp8", "bf16"), "h100")).candidates[0].cost
    cost = calm.candidates[0].cost
    assert cost is not None and whole is not None and cost.cheapest is not None and whole.cheapest is not None
    # of a machine that is rented by the hour for one request a second
    assert cost.cheapest.request == pytest.approx(whole.cheapest.per_hour / 3600)


def test_what_is_not_said_is_assumed_aloud() -> None:
    found = plan(PlanQuestion("llama-3-8b", LABELS, "h100"))
    assert [note for note in found.notes if ("--prompt" in note and "--output" in note) or "1,024" in note]
    assert found.workload.context == 1024 + 256
    said = plan(PlanQuestion("llama-3-8b", LABELS, "h100", prompt=100, output=10))
    assert not [note for note in said.notes if "assumed" in note]


def test_a_machine_that_was_not_measured_has_no_time_so_size_and_kl_decide() -> None:
    found = plan(PlanQuestion("smollm2-135m", LABELS, "cpu-x86"))
    assert all(row.step.seconds is None for each in found.candidates for row in each.rows)
    assert any("quantkit doctor --write --target cpu-x86" in note for note in found.notes)
    assert found.recommendation.label == "awq-int4"
    assert any("ranked by bytes and KL" in reason for reason in found.recommendation.because)


@pytest.mark.parametrize(
    ("embedding", "bytes_each"), [("float", 4.0), ("int8", 1 + 4 / 64), ("shared", 0.0), ("refined", 0.25 + 4 / 64)]
)
def test_a_graph_s_table_is_held_as_it_is_stored(embedding: str, bytes_each: float) -> None:
    changes = [f"onnx.embedding={embedding}"]
    (found,) = plan(PlanQuestion("smollm2-135m", ("int4-cpu",), "cpu-x86", changes=changes)).candidates
    assert found.memory is not None
    assert found.memory.parts["embeddings"] == 49152 * 576 * bytes_each


def test_emulated_weights_are_read_as_floats() -> None:
    floats, emulated = plan(PlanQuestion("llama-3-8b", ("bf16", "int4"), "h100", runtime="torch")).candidates
    assert emulated.cells[0].state == "emulated"
    assert emulated.rows[0].step.least == floats.rows[0].step.least


def test_one_recipe_that_cannot_be_planned_is_an_error_and_among_others_a_remark() -> None:
    with pytest.raises(InputError, match="group-indivisible"):
        plan(PlanQuestion("smollm2-135m", ("awq-int4",), "h100", changes=("scheme.weights.group=128",)))
    for recipes in (("awk-int4",), ("awk-int4", "bf16")):  # a slip of the pen always is
        with pytest.raises(InputError, match="unknown-recipe"):
            plan(PlanQuestion("smollm2-135m", recipes, "h100"))
    found = plan(PlanQuestion("smollm2-135m", ("int8-network", "bf16"), "h100"))
    assert found.candidates[0].problem is not None
    assert found.recommendation.label == "bf16"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (PlanQuestion("llama-3-8b", context=9000), "context-too-long"),
        (PlanQuestion("llama-3-8b", prompt=8000, output=8000), "context-too-long"),
        (PlanQuestion("llama-3-8b", prompt=0), "traffic-invalid"),
        (PlanQuestion("llama-3-8b", output=-1), "traffic-invalid"),
        (PlanQuestion("llama-3-8b", prompt=100, output=100, context=150), "usage"),
        (PlanQuestion("llama-3-8b", rate=0.0), "traffic-invalid"),
        (PlanQuestion("llama-3-8b", rate=float("nan")), "traffic-invalid"),
        (PlanQuestion("llama-3-8b", devices=0), "usage"),
        (PlanQuestion("llama-3-8b", ("bf16",), "h100", devices=3), "devices-uneven"),
        (PlanQuestion("llama-3-8b", ("awq-int4",), "h100", runtime="llama_cpp"), "usage"),
        (PlanQuestion("llama-3-8b", ("bf16", "int4"), "h100", devices=3), "devices-uneven"),
        (PlanQuestion("vit-b-16", target="l4", prompt=5), "usage"),
        (PlanQuestion("vit-b-16", target="l4", context=300), "usage"),
        (PlanQuestion("bert-base", target="l4", output=5), "usage"),
        (PlanQuestion("bert-base", target="l4", variation=1.0), "usage"),
        (PlanQuestion("bert-base", target="l4", rate=1.0), "usage"),
        (PlanQuestion("lama-3-8b"), "unknown-model"),
        (PlanQuestion("llama-3-8b", target="h1000"), "unknown-target"),
        (PlanQuestion("llama-3-8b", ("int8-network",), "cpu-x86"), "model-kind"),
        (PlanQuestion("llama-3-8b", ("bf16",), "h100", runtime="onnxruntime"), "target-cannot-run"),
    ],
)
def test_a_wrong_question_to_plan_is_refused(question: PlanQuestion, code: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(question)
    assert caught.value.code == code


def test_nothing_heavy_is_imported_for_the_largest_model_without_experts() -> None:
    script = (
        "import json, sys; from quantkit.pipeline.plan import PlanQuestion, plan; "
        "found = plan(PlanQuestion('llama-3.1-405b', target='h200', devices=8)); "
        "print(json.dumps([found.architecture.parameters, sorted(sys.modules)]))"
    )
    done = forked.run("-c", script, light=True, check=True)
    parameters, loaded = json.loads(done.stdout)
    assert parameters > 4e11
    assert not {"torch", "transformers", "scipy", "plotly", "onnx", "onnxruntime", "pandas"} & set(loaded)


def test_another_float_than_the_target_computes_in_is_said() -> None:
    found = plan(PlanQuestion("llama-3-8b", ("fp32", "bf16"), "h100", batches=(1,)), samples=[])
    other, same = found.candidates
    assert [note for note in other.notes if "reckoned" in note] == ["reckoned in bfloat16, in which h100 computes"]
    assert not [note for note in same.notes if "reckoned" in note]


def test_an_unknown_runtime_is_refused_once() -> None:
    with pytest.raises(InputError, match="llama_cpp") as raised:
        plan(PlanQuestion("llama-3-8b", LABELS, "h100", "llama.cpp"), samples=[])
    assert raised.value.code == "target-cannot-run"


def test_the_usual_recipes_are_those_that_the_target_has_kernels_for() -> None:
    usual = plan(PlanQuestion("llama-3-8b", target="jetson-orin", batches=(1,)), samples=[]).candidates
    assert [(each.label, each.runtime) for each in usual] == [("float", "torch"), ("int4-tensorrt", "tensorrt")]
    # vLLM reads the checkpoint too, but runs no image
    images = plan(PlanQuestion("vit-b-16", target="a10", batches=(1,)), samples=[]).candidates
    assert [(each.label, each.runtime) for each in images] == [("float", "torch"), ("int8-tensorrt", "tensorrt")]
