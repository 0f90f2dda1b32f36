"""The work of a block on a GPU that is not there: few launches, one look at what went wrong, and that is reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import fake_gpu
import pytest
import torch
import zoo

pytest.importorskip("triton")  # Linux alone has it

from quantkit.errors import InputError
from quantkit.passes import pass_of
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.blocks.work import PassRun, Worked, work
from quantkit.recipe import Recipe

# of one transformer block, what is traced and what is found on the first one included
LAUNCHES = 200


def prepared(recipe: str) -> Callable[[], Iterator[Worked]]:
    """A model on the processor, and what works on its blocks where a GPU is."""
    model, ids, probe = zoo.tiny("llama").eval(), zoo.ids(4, 32), zoo.ids(2, 12)
    stream, made = fake_gpu.FakeStream(model, ids, probe), Recipe.load(recipe, ["scheme.weights.group=32"])
    layers = lay_out(made, model, stream.block_names, "float32")

    steps = [PassRun(pass_of(step), step.settings) for step in made.passes]
    options = {"widest": layers.widest, "dtype": torch.bfloat16}
    like = fake_gpu.like
    return lambda: work(stream, steps, layers.schemes, like(ids), probe_ids=like(probe), **options)


def test_a_block_takes_few_launches_and_waits_once() -> None:
    looked: Counter[str] = Counter()
    worked = prepared("gptq-int4")
    with fake_gpu.gpu() as watch:
        for number, done in enumerate(worked()):
            launched, waits = watch.taken()
            assert 0 < launched.total() <= LAUNCHES, launched.most_common()
            assert {each.codes.device.type for each in done.block.tensors.values()} == {"cuda"}
            assert len(done.block.tensors) == 7
            if number:  # modules that are imported on the first look at values of their own
                looked.update(waits)
    assert looked == {"calibrate/statistics/collected.py:failed": 2}


def test_what_is_not_finite_on_a_gpu_is_an_error_when_the_block_is_done() -> None:
    worked = prepared("gptq-int4")
    with (
        fake_gpu.gpu({torch.float64: math.nan}),
        pytest.raises(InputError, match=r"activations-nonfinite.*self_attn.q_proj"),
    ):
        next(worked())
