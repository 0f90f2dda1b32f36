"""How a quantized linear lies in a checkpoint's files: one layout a file, by the name its own library calls it.

What is written and what is read of one layout stand together. A layout is looked up here and nowhere else: by the name
a recipe calls it, or by the `quantization_config` that was written.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quantkit import plugins
from quantkit.errors import InputError, unknown_name
from quantkit.formats import QuantTensor, load_format
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch


# of vLLM's Marlin kernels; -1: per channel
MARLIN_GROUPS = (-1, 32, 64, 128)
# what a regular expression begins with among names
REGEX = "re:"
DENSE = "export: checkpoint: {layout: dense}"
Header = tuple[str, str, tuple[int, ...]]
# linear -> scheme; linear -> [N, K]
Schemes = Mapping[str, WeightScheme]
Shapes = Mapping[str, tuple[int, int]]
# a stored tensor by its full name in the files
Read = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class Expansion:
    """Turns stored tensors into the weight that they stand for.

    Args:
        library: the package whose code does it; None: our own reader, where the library is not installed.
        weight: (linear's name in the files, what reads a stored tensor) -> [N, K], in the dtype the model is loaded in.
    """

    library: str | None
    weight: Callable[[str, Read], torch.Tensor]


class Layout(Protocol):
    """One layout; it inherits what it does not declare. Torch-free at import; `prefix` is a linear's name in the files.

    Attributes:
        name: its file's stem; recipes write `-` for `_`.
        libraries: the packages without which transformers does not load it, by their import names.
        kernels: whether the loaded model multiplies in kernels of the library, whose rounding is their own.
        serving: what vLLM needs beside itself to read it, or does otherwise than it is stored; "" where nothing.
        codes: suffix of the tensor that holds the codes: the large one, which is made last and never waits in memory.
        parts: suffixes of all that it stores of one linear.
    """

    name: str
    libraries: ClassVar[tuple[str, ...]]
    kernels: ClassVar[bool] = False
    serving: str
    codes: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        """Refuse what it cannot hold of linears -> [N, K]: `layout-unsupported`, the first one; MissingDependency."""

    def served(self, scheme: WeightScheme) -> bool:
        """Tell whether vLLM has a kernel that reads it."""
        return True

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """Return (name, safetensors dtype, shape) of all that is stored of [N, K]."""

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """Make the tensor that holds the codes."""

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Make all other stored tensors; `dtype` is what the model will be loaded in. InputError (`scale-inexact`)."""

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        """Make the `quantization_config` of config.json; `ignore`: names, or regular expressions behind `re:`."""

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Tell whether a `quantization_config` is this layout's."""

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """List the linears that are stored this way, from all tensors' names."""
        return stored_with(self.codes, names)

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """Return [N, K] of a stored linear."""

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        """Read what codes are multiplied by: finite, and positive but over weights that are all zero."""

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Count the bits at most by which the files exceed the format's own count: padding, shapes, tables."""
        return 0

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """Invert `packed` and `companions`, by our own code."""

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """Make the weight [N, K] as its library does, bit for bit: code times scale in the dtype of the model."""
        return load_format(tensor.scheme.format).dequantize(tensor).to(dtype)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """Return what expands the stored tensors, by its library's own code where that is installed."""


load_layout = plugins.Kind[Layout]("model.layouts").load


def names() -> list[str]:
    """List what recipes may call for, sorted."""
    return [name.replace("_", "-") for name in plugins.LAYOUTS.names()]


def load(name: str) -> Layout:
    """Load a layout by the name that recipes call it. Raises InputError (`unknown-layout`)."""
    if name not in names():
        raise unknown_name("layout", name, names())
    return load_layout(name.replace("-", "_"))


def missing(layout: Layout) -> list[str]:
    """List what is not installed of the packages that transformers loads it with."""
    return [name for name in layout.libraries if importlib.util.find_spec(name) is None]


def stored_with(suffix: str, names: Iterable[str]) -> list[str]:
    """List the linears of which a tensor with this suffix is stored, from all tensors' names."""
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def of(config: Mapping[str, Any]) -> Layout:
    """Find the layout of a checkpoint by its `quantization_config`. Raises InputError (`unknown-layout`)."""
    for name in names():
        if (layout := load(name)).wrote(config):
            return layout
    value = f"{config.get('quant_method')} {config.get('format') or config.get('checkpoint_format') or ''}".strip()
    rule = f"known: {', '.join(names())}"
    raise InputError("unknown-layout", "config.json: quantization_config", value, rule)


def unsupported(where: str, value: str, rule: str, remedy: str = DENSE) -> InputError:
    """Make `layout-unsupported` of one linear."""
    return InputError("layout-unsupported", where, value, rule, remedy)


def check_format(layout: str, held: str, schemes: Schemes, remedy: str = DENSE) -> None:
    """Refuse the first linear of another format than the one `held`: `layout-unsupported`."""
    for linear, scheme in schemes.items():
        if scheme.format != held:
            raise unsupported(linear, f"{layout} of {scheme.format}", f"this layout holds {held}", remedy)
