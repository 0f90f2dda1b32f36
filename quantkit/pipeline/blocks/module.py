"""Apply passes to an `nn.Module` in memory: `quantkit.Pipeline([...]).apply(model, inputs)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.passes import ModelOutcome, pass_of
from quantkit.plugins.outside import demand_returned
from quantkit.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.formats import QuantTensor


def _plain(value: Any) -> Any:
    """Return mappings and sequences as YAML would give them; what is neither is left to validation."""
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


class Pipeline:
    """Passes to apply to a module, in order.

    scheme = {"format": "int4", "granularity": "group", "group": 64}
    Pipeline(["fold_norms", {"gptq": {"damping": 0.02}}], weights=scheme).apply(model, ids)

    Args:
        passes: names, paths, or {name: settings}; exactly one of them assigns the codes.
        weights: weight scheme, as in a recipe; needed if a pass assigns codes.
        activations: scheme of the inputs, as in a recipe; hooks that stay on the module's linears apply it.
        overrides, keep, on_indivisible, seed: as in a recipe.
        allow_code: True to run the files that passes name (`./my_pass.py`).

    Raises:
        InputError: unknown pass or setting, wrong scheme.
    """

    def __init__(
        self,
        passes: Sequence[str | Path | Mapping[str | Path, Any]],
        *,
        weights: Mapping[str, Any] | None = None,
        activations: Mapping[str, Any] | None = None,
        overrides: Sequence[Mapping[str, Any]] = (),
        keep: Sequence[str] = (),
        on_indivisible: str = "error",
        seed: int = 0,
        allow_code: bool = False,
    ) -> None:
        data = {
            "schema": 1,
            "summary": "a pipeline",
            "models": ["decoder", "encoder", "network"],
            "passes": _plain(passes),
            "scheme": {"weights": _plain(weights), "activations": _plain(activations)},
            "overrides": _plain(overrides),
            "keep": _plain(keep),
            "on_indivisible": on_indivisible,
            "seed": seed,
        }
        self.recipe = Recipe.from_dict(data, name="pipeline", where="Pipeline", allow_code=allow_code)
        self.tensors: dict[str, QuantTensor] = {}
        self.decisions: list[Decision] = []

    def apply(self, model: nn.Module, inputs: Tensor) -> nn.Module:
        """Quantize a module in place: its weights become the values that the codes stand for.

        Args:
            model: a transformers model (its layers are the blocks) or any other module (one block).
            inputs: token ids [samples, tokens] for a transformer; for another module, its input [samples, ...].

        Returns:
            the same module. `self.tensors` holds the codes by layer, `self.decisions` what was done otherwise.

        Raises InputError: `stream-differs` and `stream-unsupported`, before anything of it is changed: run block by
        block, a transformer does not give what it gives as a whole; those of the recipe and of the passes.
        """
        import torch

        from quantkit.model.streaming import own_forward
        from quantkit.model.streaming.stream import LoadedModel
        from quantkit.pipeline.blocks.layers import lay_out
        from quantkit.pipeline.blocks.work import PassRun, check_order, work

        stream = LoadedModel(model)
        own_forward.demand_equal_in_memory(stream, inputs)
        dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        layers = lay_out(self.recipe, model, stream.block_names, str(dtype).removeprefix("torch."))
        steps = [PassRun(pass_of(step), step.settings) for step in self.recipe.passes]
        check_order(steps)
        if any(step.run.scope == "answers" for step in steps):
            rule, remedy = "it trains what a compile has committed", "call quantkit.compile, or leave the pass out"
            raise InputError("recover-unable", "Pipeline", f"passes: {steps[-1].run.name}", rule, remedy)
        self.tensors, self.decisions = {}, list(layers.decisions)
        for step in steps:
            if step.run.scope == "model":
                returned = step.run.transform(stream, step.settings, self.recipe.seed)
                outcome = demand_returned(returned, ModelOutcome, step.run, "transform")
                self.decisions += outcome.decisions
                if outcome.transform is not None:
                    stream.apply(outcome.transform)
                if outcome.unties and getattr(model.config, "tie_word_embeddings", False):
                    model.config.tie_word_embeddings = False  # type: ignore[union-attr]
        probe = inputs[:2, :12] if stream.paths else inputs[:2]
        how: dict[str, Any] = {"widest": layers.widest, "dtype": dtype, "seed": self.recipe.seed}
        for worked in work(
            stream, steps, layers.schemes, inputs, probe_ids=probe, activations=layers.activations, **how
        ):
            self.decisions += worked.decisions
            for name, tensor in worked.block.tensors.items():
                self.tensors[worked.block.full_name(name)] = tensor
        return model
