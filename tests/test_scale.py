"""docs/scale.md counts the work of a compile as torch counts it, and simulates nights that add up."""

import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from quantkit.calibrate.statistics.sums import InputStats
from quantkit.model.sizes import configs
from quantkit.planning.compiling import described, shared
from quantkit.recipe import Recipe

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import fleet
import stage_ceilings as counted
from harness.stage_side import PLACES

TOKENS, SAMPLES = 32, 3
SHAPES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES |= {"num_key_value_heads": 2, "vocab_size": 96}


def spec(recipe: str, *changes: str) -> counted.CompileSpec:
    config = transformers.LlamaConfig(**SHAPES, architectures=["LlamaForCausalLM"]).to_dict()
    changes = (*changes, f"calibration.samples={SAMPLES}", f"calibration.tokens={TOKENS}", "scheme.weights.group=32")
    return described(configs.from_config(config, "small"), Recipe.load(recipe, [*changes]))


def torch_counts(*, backward: bool = False) -> float:
    model = transformers.LlamaModel(transformers.LlamaConfig(**SHAPES, attn_implementation="eager"))
    model.requires_grad_(False)
    inputs = torch.randn(SAMPLES, TOKENS, SHAPES["hidden_size"], requires_grad=backward)
    with FlopCounterMode(display=False) as counter:
        out = model(inputs_embeds=inputs).last_hidden_state
        if backward:
            out.sum().backward()
    return float(counter.get_total_flops())


# of torch's count of attention a causal one needs half; rotations, which are no work on weights, are in the rest
ATTENTION = SHAPES["num_hidden_layers"] * 4 * SAMPLES * TOKENS * TOKENS * SHAPES["hidden_size"]


def test_forwards_and_gradients_are_counted_as_torch_counts_them() -> None:
    found = counted.stages(spec("int4-best", f"gptq.gradients={SAMPLES}"))
    for stage in ("forwards", "float forwards"):
        assert found[stage].operations == pytest.approx(torch_counts() - ATTENTION / 2, rel=2e-3)
    both, head = torch_counts() + torch_counts(backward=True), 4 * SAMPLES * TOKENS * 96 * 64
    assert found["gradients"].operations == pytest.approx(both - 4 * ATTENTION / 2 + head, rel=2e-3)


def test_a_block_that_runs_again_up_to_each_input_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    once = counted.stages(spec("gptq-int4"))["forwards"].operations
    monkeypatch.setattr("quantkit.planning.compiling.ACTIVATION_BYTES", 1)
    asked = spec("gptq-int4")
    # to q: nothing; to o: q, k, v and attention; to gate: o too; to down: gate and up too
    inner = [SAMPLES * TOKENS * 2 * part for part in (64 * 128, 64 * 64, 2 * 64 * 160)]
    again = 2 * (3 * inner[0] + 2 * inner[1] + inner[2]) + 3 * ATTENTION / 2
    assert counted.stages(asked)["forwards"].operations == pytest.approx(once + again)
    assert counted.stages(asked, at_once=True)["forwards"].operations == once


def test_sums_are_the_upper_half_of_their_products() -> None:
    tokens, width = 16, 1024

    def in_place(total: list[int], left: list[int], right: list[int], **_: object) -> int:
        return 2 * left[0] * left[1] * right[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        InputStats([torch.randn(2, tokens // 2, width)])
    assert tokens * width**2 <= counter.get_total_flops() <= tokens * width * (width + 256)
    asked = spec("gptq-int4")
    wide = sum(group[0].K ** 2 for layer in asked.architecture.layers for group in shared(layer))
    assert counted.stages(asked)["sums"].operations == SAMPLES * TOKENS * wide


def test_stages_are_timed_in_places_that_exist() -> None:
    assert not [(stage, name) for stage, owner, name in PLACES if name not in vars(owner)]


def test_ranks_share_what_goes_by_sequences_and_rows() -> None:
    asked, rates = spec("gptq-int4"), {"fp32": 1.0, "bf16": 1.0, "memory": 1e30}
    one, eight = counted.least(asked, rates), counted.least(asked, rates, 8)
    assert eight["factors"] == one["factors"]
    assert eight["sums"] == one["sums"] / 8
    assert eight["between ranks"] > 0 == one.get("between ranks", 0)


@pytest.mark.parametrize("longest", [True, False])
def test_a_night_without_losses_is_what_a_division_says(longest: bool) -> None:
    assert fleet.night([5.0] * 23, 4, longest=longest) == fleet.Night(30.0, 115.0, 0)
    jobs = [float(number % 7 + 1) for number in range(50)]
    found = fleet.night(jobs, 6, longest=longest)
    assert max(sum(jobs) / 6, 7.0) <= found.seconds <= sum(jobs) / 6 + 7.0
    assert found.busy == sum(jobs)


def test_the_longest_first_leaves_no_straggler() -> None:
    jobs = [1.0] * 12 + [6.0]
    assert (fleet.night(jobs, 3, longest=True).seconds, fleet.night(jobs, 3, longest=False).seconds) == (6.0, 10.0)
    assert fleet.needed([fleet.NIGHT / 2] * 7, longest=True) == math.ceil(7 / 2)


def test_a_loss_costs_its_last_seconds_and_a_resume() -> None:
    jobs = [4000.0] * 60
    found = fleet.night(jobs, 10, longest=True, every=5000.0)
    assert found.losses > 20
    assert sum(jobs) + 60 * found.losses <= found.busy <= sum(jobs) + 90 * found.losses
    assert found.seconds > fleet.night(jobs, 10, longest=True).seconds
    assert fleet.night(jobs, 10, longest=True, every=5000.0) == found
