"""Some sequences in an engine, and one step of theirs, which is replayed as one CUDA graph.

The cache is one buffer a layer, bound as past and as present: the engine writes new keys and values at `write_indices`,
and nothing is copied or moved. So every step finds its tensors where the last one did, and what was captured once is
right at every position: ids, positions, mask and place are written into the same tensors before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantkit.runtimes.tensorrt.engine import Engine
from quantkit.runtimes.torch import events

if TYPE_CHECKING:
    import torch

CACHE = "past_key_values."


@dataclass
class EngineState:
    """Some sequences.

    Args:
        batch: how many.
        capacity: columns of the cache.
        caches: input -> buffer [B, H, capacity, D].
        mask: [B, capacity], 1 where a token is.
        real: [B], tokens so far, padding left out.
        length: columns that are filled.
        step: a step of this state, once there was one.
    """

    batch: int
    capacity: int
    caches: dict[str, torch.Tensor]
    mask: torch.Tensor
    real: torch.Tensor
    length: int = 0
    step: EngineStep | None = field(default=None, repr=False)


class EngineStep:
    """One token more of each sequence of a state, [B, 1]: captured when it first runs, on a GPU."""

    def __init__(self, engine: Engine, state: EngineState) -> None:
        import torch

        self.engine = engine
        number, _ = engine.profile(state.batch, 1)
        # of its own: a graph is of the shapes and addresses that its context had when it was captured
        self._context = engine.new_context(number)
        empty = torch.zeros(state.batch, 1, dtype=torch.long, device=state.mask.device)
        self._inputs = inputs(engine, state, empty, empty, 0, 0)
        self._outputs: dict[str, torch.Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, before: int) -> torch.Tensor:
        """Logits [B, 1, V]; the next step overwrites them."""
        self._inputs["input_ids"].copy_(tokens)
        if "position_ids" in self._inputs:
            self._inputs["position_ids"].copy_(positions)
        self._inputs["write_indices"].fill_(before)
        self.replay()
        self.engine.wait()
        return self._outputs["logits"]

    def replay(self) -> None:
        """The same step once more."""
        if self.engine.device.type != "cuda":
            self.enqueue()
            return
        if self._graph is None:  # what warms up writes what the step that follows writes to the same place
            self._graph = events.captured(self.enqueue)
        self._graph.replay()

    def enqueue(self) -> None:
        """The same step, launched one by one."""
        if not self._outputs:
            self._outputs = self.engine.bind(self._context, self._inputs)
        self.engine.enqueue(self._context)


def inputs(
    engine: Engine, state: EngineState, tokens: torch.Tensor, positions: torch.Tensor, before: int, keep: int
) -> dict[str, torch.Tensor]:
    """Everything that goes in, each in the type that the engine has it in.

    Args:
        state: whose cache and mask they are.
        tokens, positions: [B, S].
        before: columns of the cache that are filled.
        keep: how many positions from the end to give logits for; 0 is all.
    """
    made = {name: engine.tensor(name, tuple(tokens.shape)) for name in ("input_ids", "position_ids")}
    made["input_ids"].copy_(tokens)
    made["position_ids"].copy_(positions)
    made["write_indices"] = engine.tensor("write_indices", (state.batch,)).fill_(before)
    if "logits_to_keep" in engine.inputs:
        made["logits_to_keep"] = engine.tensor("logits_to_keep", (1,)).fill_(keep)
    made |= {"attention_mask": state.mask, **state.caches}
    return {name: tensor for name, tensor in made.items() if name in engine.inputs}
