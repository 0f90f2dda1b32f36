"""A checkpoint as `runtimes.generate.Decoder`: tokens in, logits out, by transformers' own classes and cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.model.structure.kinds import positions
from quantkit.runtimes.generate import Array, too_long

if TYPE_CHECKING:
    from transformers import DynamicCache


class TorchDecoder:
    """See the module.

    Args:
        model: a decoder of transformers, on its device.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.context = positions(model.config.to_dict()) or 1 << 30

    def state(self, batch: int, capacity: int) -> DynamicCache:
        """A cache, which grows: the batch is that of the first tokens. Raises InputError `prompt-too-long`."""
        from transformers import DynamicCache

        if capacity > self.context:
            remedy = "shorten the prompt, or ask for fewer new tokens"
            raise too_long("--prompt", capacity, f"the context holds {self.context}", remedy)
        return DynamicCache(config=self.model.config)

    def run(self, state: DynamicCache, ids: Array, mask: Array | None = None, *, keep: int = 0) -> Array:
        """Logits [B, S or keep, V], float32, of tokens [B, S] that follow those of a state."""
        import torch

        assert mask is None, "prompts are of one length"
        with torch.no_grad():
            found = self.model(
                input_ids=torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.model.device),
                past_key_values=state,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: Array = found.logits.float().cpu().numpy()
        return logits
