"""Convolutional networks for images, built from a description.

    stem        convolution k x k, norm, activation
    stages      blocks, each repeated; the first of a stage has its stride:
                  expand     1 x 1 to `expansion` times the channels, norm, activation; absent for expansion 1
                  depthwise  k x k on each channel alone, norm, activation
                  project    1 x 1 to the stage's channels, norm; an activation unless `linear`
                  + its input, if the shapes agree and `residual`
    head        1 x 1 convolution, norm, activation
    pooling     mean over height and width
    classifier  a linear layer, with bias

A linear block is an inverted residual of MobileNetV2 (Sandler et al. 2018) or EfficientNet (Tan and Le 2019). A block
of
expansion 1 that is not linear is a separable convolution of MobileNet (Howard et al. 2017). Padding is SAME, as in
TensorFlow: the output has ceil(size / stride), and odd padding goes to the right and bottom, e.g. for 224 pixels,
kernel 3, stride 2: one row below, none above. Batch norms are separate from their convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from quantkit import limits
from quantkit.content import Closed, validated
from quantkit.errors import InputError
from quantkit.model.source.weights import SINGLE, Weights, dtype_name, strict_json, write_safetensors

CONFIG = "config.json"
# counter of a norm's training steps, unused in inference
_COUNTER = "num_batches_tracked"
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "relu6": nn.ReLU6}


class Stem(Closed):
    """First convolution."""

    channels: int = Field(gt=0)
    kernel: int = Field(default=3, gt=0)
    stride: int = Field(default=1, gt=0)


class ConvStage(Closed):
    """A stage of `repeats` blocks with `channels` output channels; see the module."""

    channels: int = Field(gt=0)
    repeats: int = Field(default=1, gt=0)
    kernel: int = Field(default=3, gt=0)
    stride: int = Field(default=1, gt=0)
    expansion: int = Field(default=1, gt=0)
    linear: bool = True
    residual: bool = True


class CnnConfig(Closed):
    """Description of a network for images [channels, size, size], with relu or relu6 = min(max(x, 0), 6).

    `head` is the number of its channels; None leaves it out. `dropout` applies before the classifier, in training.
    """

    channels: int = Field(gt=0)
    size: int = Field(gt=0)
    classes: int = Field(gt=0)
    activation: Literal["relu", "relu6"]
    norm_epsilon: float = Field(default=1e-5, gt=0)
    stem: Stem
    stages: list[ConvStage] = Field(min_length=1)
    head: int | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _large_enough(self) -> Self:
        size = self.size
        for stride in (self.stem.stride, *(stage.stride for stage in self.stages)):
            if stride > size:
                raise ValueError(f"a stride of {stride} where {size} pixels are left")
            size = -(-size // stride)
        return self

    @classmethod
    def load(cls, path: Path) -> CnnConfig:
        """Read a `config.json`. Raises InputError (`config-invalid`, `file-unreadable`)."""
        try:
            data = limits.read(path)
        except OSError as error:
            raise InputError("file-unreadable", str(path), str(error), remedy="check the file") from None
        parsed = strict_json(data, str(path), "config-invalid", "config-invalid")
        return validated(cls, parsed, where=str(path), code="config-invalid")


class Convolution(nn.Module):
    """Convolution without bias, a norm, and an optional activation; `groups` is 1, or the number of channels
    (depthwise).
    """

    def __init__(
        self,
        config: CnnConfig,
        inputs: int,
        outputs: int,
        *,
        size: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        activated: bool = True,
    ) -> None:
        super().__init__()
        padding = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        before, after = padding // 2, padding - padding // 2
        even = before == after
        self.pad = nn.Identity() if even else nn.ZeroPad2d((before, after, before, after))
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, before if even else 0, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=config.norm_epsilon)
        self.activation = _ACTIVATIONS[config.activation]() if activated else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        outputs: Tensor = self.activation(self.norm(self.conv(self.pad(images))))
        return outputs


class ConvBlock(nn.Module):
    """One block of a stage; see the module."""

    def __init__(self, config: CnnConfig, stage: ConvStage, inputs: int, *, size: int, stride: int) -> None:
        super().__init__()
        wide = inputs * stage.expansion
        after = -(-size // stride)
        self.expand = Convolution(config, inputs, wide, size=size) if stage.expansion > 1 else nn.Identity()
        self.depthwise = Convolution(config, wide, wide, size=size, kernel=stage.kernel, stride=stride, groups=wide)
        self.project = Convolution(config, wide, stage.channels, size=after, activated=not stage.linear)
        self.residual = stage.residual and stride == 1 and inputs == stage.channels

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        outputs: Tensor = self.project(self.depthwise(self.expand(images)))
        return outputs + images if self.residual else outputs


class Cnn(nn.Module):
    """Network of a description, from normalised images [n, channels, size, size] to logits [n, classes]."""

    def __init__(self, config: CnnConfig) -> None:
        super().__init__()
        self.config = config
        stem = config.stem
        self.stem = Convolution(
            config, config.channels, stem.channels, size=config.size, kernel=stem.kernel, stride=stem.stride
        )
        channels, size = stem.channels, -(-config.size // stem.stride)
        blocks = []
        for stage in config.stages:
            for number in range(stage.repeats):
                stride = stage.stride if number == 0 else 1
                blocks.append(ConvBlock(config, stage, channels, size=size, stride=stride))
                channels, size = stage.channels, -(-size // stride)
        self.blocks = nn.Sequential(*blocks)
        self.head = Convolution(config, channels, config.head, size=size) if config.head else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.head or channels, config.classes)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        features: Tensor = self.head(self.blocks(self.stem(images)))
        logits: Tensor = self.classifier(self.dropout(features.mean((2, 3))))
        return logits

    def example(self) -> Tensor:
        """Return zeros in the shape of two images."""
        return torch.zeros(2, self.config.channels, self.config.size, self.config.size)


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of the network's computation, by name, in the order of its layers."""
    return {name: value for name, value in network.state_dict().items() if not name.endswith(_COUNTER)}


def fill(network: Cnn, values: Mapping[str, Tensor], *, where: str) -> None:
    """Load tensors into a network. Raises InputError (`weights-names`, `weights-shape`)."""
    wanted, remedy = tensors(network), "use the weights that belong to it"
    if odd := sorted(wanted.keys() ^ values.keys()):
        problem = f"{odd[0]} is {'missing' if odd[0] in wanted else 'not of this network'}"
        raise InputError("weights-names", where, problem, f"the tensors of {CONFIG}'s network and no others", remedy)
    for name, tensor in values.items():
        if tensor.shape != wanted[name].shape:
            rule = f"{CONFIG} says {list(wanted[name].shape)}"
            raise InputError("weights-shape", f"{where}: {name}", str(list(tensor.shape)), rule, remedy)
    with torch.no_grad():
        for name, value in values.items():
            wanted[name].copy_(value)


def load(folder: Path) -> Cnn:
    """Load the network of a folder. Raises InputError: `config-invalid`, `weights-names`, `weights-shape`."""
    network = Cnn(CnnConfig.load(folder / CONFIG)).eval()
    weights = Weights.open(folder)
    fill(network, {name: weights.read(name) for name in weights.entries}, where=folder.name)
    return network


def save(network: nn.Module, folder: Path) -> str:
    """Write `model.safetensors`; return its sha256."""
    values = tensors(network)
    headers = [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in values.items()]
    return write_safetensors(folder / SINGLE, headers, lambda name: values[name].contiguous())
