"""Runs one pass over a module's blocks and hands back what it did to each."""

from typing import Any

import torch
from torch import nn

from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure.block import Block
from quantkit.passes import Outcome
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.blocks.work import PassRun, work
from quantkit.recipe import Recipe

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}


def run(
    model: nn.Module,
    ids: torch.Tensor,
    *passes: Any,
    settings: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    fuses: bool = False,
    keep: tuple[str, ...] = (),
    overrides: tuple[dict[str, Any], ...] = (),
    activations: dict[str, Any] | None = None,
) -> tuple[list[Block], list[Outcome]]:
    """Blocks, and the outcome of the last pass on each; `settings` are of the last pass."""
    outcomes: list[Outcome] = []

    class Noted:
        """The last pass, with its outcomes kept."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def run(self, block: Block, stats: Any, chosen: Any) -> Outcome:
            outcome: Outcome = self.inner.run(block, stats, chosen)
            outcomes.append(outcome)
            return outcome

    recipe = Recipe.from_dict(
        {
            "summary": "a test",
            "scheme": {"weights": weights or GROUPED, "activations": activations},
            "passes": ["rtn"],
            "keep": list(keep),
            "overrides": list(overrides),
        },
        name="test",
    )
    stream = LoadedModel(model)
    layers = lay_out(recipe, model, stream.block_names, "float32")
    *before, last = passes
    steps = [PassRun(each, each.Settings()) for each in before]
    steps.append(PassRun(Noted(last), last.Settings(**(settings or {}))))
    probe = ids[:2, :12]
    done = work(
        stream,
        steps,
        layers.schemes,
        ids,
        probe_ids=probe,
        widest=layers.widest,
        dtype=dtype,
        fuses=fuses,
        activations=layers.activations,
    )
    return [worked.block for worked in done], outcomes
