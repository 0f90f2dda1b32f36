"""PyTorch with transformers and what it loads a layout with: loads a bundle's checkpoint as anyone else would."""

from quantkit.runtimes.torch.runtime import RUNTIME

__all__ = ["RUNTIME"]
