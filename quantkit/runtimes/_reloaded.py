"""A written checkpoint, block by block, as transformers and compressed-tensors understand it.

What `from_pretrained` does for the whole model at once happens here for one block at a time: transformers builds the
classes, compressed-tensors lays out its parameters (`apply_quantization_config`, `compress_model`) and expands them
(`decompress_module`). Only the reading of tensors is ours, so memory stays one block.
"""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from quantkit.model.open import open_written
from quantkit.model.stream import StreamedModel


class ReloadedModel(StreamedModel):
    """See the module.

    Args:
        folder: a checkpoint, quantized by compressed-tensors or dense.
    """

    def __init__(self, folder: Path) -> None:
        source = open_written(folder)
        self._config = source.config.get("quantization_config")
        super().__init__(source, prepare=self._lay_out if self._config else None)

    def _lay_out(self, skeleton: nn.Module) -> None:
        """What transformers' quantizer does before it loads weights."""
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import apply_quantization_config
        from transformers.utils.quantization_config import CompressedTensorsConfig

        config = CompressedTensorsConfig(**self._config)  # type: ignore[arg-type]
        config.post_init()
        compressor = ModelCompressor.from_compression_config(config)
        apply_quantization_config(skeleton, copy.deepcopy(compressor.quantization_config), run_compressed=False)
        compressor.compress_model(skeleton)
        compressor.remove_decompression_hook(skeleton)

    def load(self, index: int) -> nn.Module:
        """Block `index`, expanded to floats by compressed-tensors."""
        block = super().load(index)
        if self._config:
            from compressed_tensors.compressors.base import decompress_module

            for module in block.modules():
                if getattr(module, "quantization_scheme", None) is not None:
                    decompress_module(module)
        return block
