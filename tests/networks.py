"""Make a tiny network as a graph: a stem, a depthwise and a pointwise convolution, a residual, a classifier."""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import nn

from quantkit.model.source.weights import write_atomic
from quantkit.model.to_onnx import write_onnx

SIDE, CLASSES = 12, 6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depth = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.point = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.point(self.depth(x))
        return self.head(x.mean(dim=(2, 3)))


def tiny() -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(8) * 0.1
            module.running_var = torch.rand(8) + 0.5
    return model.eval()


def write(path: Path) -> Path:
    """Export `tiny()` once for all workers: an export takes more than a second."""
    made = Path(os.environ["QUANTKIT_TESTS_SHARED"]) / "tiny.onnx"
    if not made.exists():
        write_onnx(tiny(), [torch.randn(2, 3, SIDE, SIDE)], path, inputs=["images"], outputs=["logits"])
        write_atomic(made, [path.read_bytes()])
    shutil.copyfile(made, path)
    return path


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, SIDE, SIDE)).astype(np.float32)


def image_set(path: Path, count: int = 60) -> Path:
    """Make images labelled by the float network's own answers, so that it is always right."""
    values = images(count)
    with torch.no_grad():
        labels = tiny()(torch.from_numpy(values)).argmax(dim=1).numpy()
    np.savez(path, images=values, labels=labels)
    return path


class Two(nn.Module):
    """Network of images and of token ids with a mask: inputs of floats, integers, and equal floats."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 8, 3, stride=2)
        self.read = nn.Embedding(10, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.see(images)).mean(dim=(2, 3))
        return self.head(seen + (self.read(ids) * mask.unsqueeze(-1)).sum(dim=1))


def two() -> Two:
    torch.manual_seed(0)
    return Two().eval()


def two_inputs(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 10, (count, 5))
    return {"images": images(count, seed), "ids": ids, "mask": np.ones((count, 5), np.float32)}
