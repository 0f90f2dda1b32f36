"""Layouts of a quantized linear in a checkpoint's files: one file each, named as its own library names it.

Writing and reading of a layout are in one place. Layouts are looked up here only: by the name in a recipe, or by a
stored `quantization_config`.
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


# group sizes of vLLM's Marlin kernels; -1: per channel
MARLIN_GROUPS = (-1, 32, 64, 128)
# prefix of a regular expression among names
REGEX = "re:"
DENSE = "--set 'export=[{checkpoint: {layout: dense}}]' (values in floats: no smaller)"
# decision: a checkpoint with packed experts that transformers does not load
VLLM_ALONE = "checkpoint-vllm-alone"
Header = tuple[str, str, tuple[int, ...]]
# linear -> scheme; linear -> [N, K]
Schemes = Mapping[str, WeightScheme]
Shapes = Mapping[str, tuple[int, int]]
# a stored tensor by its full name in the files
Read = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class Expansion:
    """Conversion of stored tensors into a weight.

    Args:
        library: package whose code does it; None for our own reader, if the library is not installed.
        weight: function of (name of the linear in the files, function that reads a stored tensor) to [N, K], in the
            dtype of the loaded model.
        anywhere: True if it computes on the device of the tensors that are read, all but integers of 64 bits (shapes).
    """

    library: str | None
    weight: Callable[[str, Read], torch.Tensor]
    anywhere: bool = False


class Layout(Protocol):
    """Interface of a layout; methods with a body are defaults. Torch-free at import; `prefix` is a linear's name in the
    files.

    Attributes:
        name: stem of its file; recipes write `-` for `_`.
        libraries: import names of the packages that transformers needs to load it.
        stacks: True if a tensor of its files holds all experts of a layer; the parts of one linear are then slices.
        classes: classes with such experts; none: any.
        asked: words of the command line for a recipe in this layout.
        kernels: True if the loaded model multiplies in the library's own kernels, with their own rounding.
        serving: extra requirement or deviation of vLLM; "" without any.
        codes: suffix of the tensor with the codes; it is large, so it is made last.
        parts: suffixes of all its tensors.
        needed: suffixes of tensors without which a foreign linear is not read.
    """

    name: str
    libraries: ClassVar[tuple[str, ...]]
    stacks: ClassVar[bool] = False
    classes: ClassVar[tuple[str, ...]] = ()
    asked: ClassVar[str] = ""
    kernels: ClassVar[bool] = False
    serving: str
    codes: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    needed: ClassVar[tuple[str, ...]] = ()

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        """Refuse linears -> [N, K] without a place in this layout: `layout-unsupported` for the first;
        MissingDependency.
        """

    def served(self, scheme: WeightScheme) -> bool:
        """Tell whether vLLM has a kernel for it."""
        return True

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """Return (name, safetensors dtype, shape) of every stored tensor of [N, K]."""

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """Return the tensor of codes."""

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return all other tensors; `dtype` is that of the loaded model. InputError (`scale-inexact`)."""

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        """Return the `quantization_config` of config.json; `ignore` has names, or regular expressions behind `re:`."""

    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Tell whether a `quantization_config` is this layout's."""

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """List the linears in this layout, from the names of all tensors."""
        return stored_with(self.codes, names)

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """Return [N, K] of a stored linear."""

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        """Read the scales: finite, and positive except for weights of zeros."""

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Return the most bits by which the files exceed the format's own count: padding, shapes, tables."""
        return 0

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """Invert `packed` and `companions`, by our own code."""

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """Return the weight [N, K] as its library computes it, bit for bit: code times scale in the model's dtype."""
        return load_format(tensor.scheme.format).dequantize(tensor).to(dtype)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """Return the expansion of stored tensors, by the library's own code if it is installed."""


load_layout = plugins.Kind[Layout]("model.layouts").load


def names() -> list[str]:
    """List the names of layouts in recipes, sorted."""
    return [name.replace("_", "-") for name in plugins.LAYOUTS.names()]


def load(name: str) -> Layout:
    """Load a layout by its name in recipes. Raises InputError (`unknown-layout`)."""
    if name not in names():
        raise unknown_name("layout", name, names())
    return load_layout(name.replace("-", "_"))


def missing(layout: Layout) -> list[str]:
    """List packages for loading a layout in transformers, if not installed."""
    return [name for name in layout.libraries if importlib.util.find_spec(name) is None]


def stored_with(suffix: str, names: Iterable[str]) -> list[str]:
    """List the linears with a tensor of this suffix, from the names of all tensors."""
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def of(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a checkpoint from its `quantization_config`. Raises InputError (`unknown-layout`)."""
    for name in names():
        if (layout := load(name)).wrote(config):
            return layout
    value = f"{config.get('quant_method')} {config.get('format') or config.get('checkpoint_format') or ''}".strip()
    rule = f"known: {', '.join(names())}"
    raise InputError("unknown-layout", "config.json: quantization_config", value, rule)


def unsupported(where: str, value: str, rule: str, remedy: str = DENSE) -> InputError:
    """Make the error `layout-unsupported` for one linear."""
    return InputError("layout-unsupported", where, value, rule, remedy)


def check_format(layout: str, held: str, schemes: Schemes, remedy: str = DENSE) -> None:
    """Refuse the first linear of a format other than `held`: `layout-unsupported`."""
    for linear, scheme in schemes.items():
        if scheme.format != held:
            raise unsupported(linear, f"{layout} of {scheme.format}", f"this layout holds {held}", remedy)
