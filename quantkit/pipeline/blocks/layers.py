"""The linears of a model, and which of them is stored how (`model/sizes/assigned.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from quantkit.bundle import Decision, LayerEntry
from quantkit.exporters import LayerSpec
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.activation import InputScale
from quantkit.model.sizes.assigned import assign, takes_head
from quantkit.model.structure import experts
from quantkit.model.structure.traced import is_linear, weight_of
from quantkit.pipeline.blocks.accounting import no_product
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme


@dataclass(frozen=True)
class Layers:
    """The linears inside the blocks, and the head if it is to be quantized.

    Args:
        shapes: full name -> [N, K], of every one.
        schemes: full name -> scheme, of those to quantize.
        plain: full names of those that are `torch.nn.Linear`, which is what other libraries can load quantized.
        decisions: those left in high precision against the default, and what is stored otherwise than the scheme says.
        head: the language-model head's name, if it is to be quantized.
        tied: the head again, if it shares its weight with the embedding.
        activations: full name -> how its input is quantized, of those in `schemes` whose input is; never the head's.
        merged: those of experts, which transformers merges while it loads them.
    """

    shapes: Mapping[str, tuple[int, int]]
    schemes: Mapping[str, WeightScheme]
    plain: frozenset[str]
    decisions: Sequence[Decision]
    head: str | None = None
    tied: frozenset[str] = frozenset()
    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    merged: frozenset[str] = frozenset()

    @property
    def inside(self) -> Mapping[str, tuple[int, int]]:
        """`shapes` of the linears inside the blocks."""
        return {name: shape for name, shape in self.shapes.items() if name != self.head}

    @property
    def widest(self) -> int:
        """The largest number of features that goes into or comes out of a linear inside the blocks."""
        return max((max(shape) for shape in self.inside.values()), default=1)

    def padded(self) -> list[str]:
        """The layers whose last group is filled up with zeros."""
        return [name for name, scheme in self.schemes.items() if scheme.padding(self.shapes[name][1])]

    def asked(self, *, partly: bool = False, cache: CacheScheme | None = None) -> LayerSpec:
        """What an export has to hold of a compile of these."""
        return LayerSpec(
            self.schemes,
            self.plain,
            self.padded(),
            self.tied,
            self.shapes,
            self.merged,
            partly,
            self.activations,
            cache,
        )

    def entry(
        self, name: str, tensor: QuantTensor, error: float | None, static: InputScale | None = None
    ) -> LayerEntry:
        """A quantized layer as the manifest lists it; `error` is its relative squared weight error, `static` the fixed
        scale of its input.
        """
        form = load_format(tensor.scheme.format)
        rows, columns = self.shapes[name]
        stored = (rows, tensor.shape[1])  # with what fills up the last group
        return LayerEntry(
            name=name,
            shape=[rows, columns],
            scheme=tensor.scheme.model_dump(mode="json"),
            bits_per_weight=form.bits_per_weight(stored, tensor.scheme) * stored[1] / columns,
            error=error,
            activations=self.activations[name].model_dump(mode="json") if name in self.activations else None,
            input_scale=float(static.scale) if static is not None else None,
        )


def lay_out(
    recipe: Recipe,
    model: nn.Module,
    block_names: Sequence[str],
    dtype: str,
    *,
    head: str | None = None,
    largest: Mapping[str, float] | None = None,
) -> Layers:
    """Decide for every linear inside the blocks of a model (with or without weights), and for its head.

    Args:
        recipe: its scheme, overrides, `keep` and `on_indivisible`.
        model: has the blocks at `block_names`.
        block_names: paths of the blocks; `""` for a model that is one block.
        dtype: what the source stores; bfloat16 models read bfloat16 scales.
        head: a decoder's language-model head, by its name; quantized unless the recipe keeps it. None leaves it out.
        largest: parameter -> its largest magnitude, of those that were looked at.

    Raises:
        InputError: `override-unmatched`, `keep-unmatched`, `group-indivisible`, `nothing-to-quantize`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    plain, merged = set(), set()
    apart: dict[str, bool] = {}
    for block in block_names:
        for path, module in model.get_submodule(block).named_modules():
            name = f"{block}.{path}" if block else path
            if isinstance(module, experts.Expert):
                merged |= {f"{name}.{leaf}" for leaf, _ in module.named_children()}
            if is_linear(module):
                rows, columns = weight_of(module).shape
                shapes[name] = (rows, columns)
                if isinstance(module, nn.Linear):
                    plain.add(name)
            elif any(not no_product(module, leaf) for leaf, _ in module.named_parameters(recurse=False)):
                apart[name] = experts.is_merged(module)
    if not takes_head(recipe):
        head = None
    tied = frozenset[str]()
    if head is not None:
        weight = model.get_parameter(f"{head}.weight")
        shapes[head] = (weight.shape[0], weight.shape[1])
        plain.add(head)
        others = (value for name, value in model.named_parameters(remove_duplicate=False) if name != f"{head}.weight")
        tied = frozenset([head] if any(value is weight for value in others) else [])
    found = assign(
        recipe,
        shapes,
        dtype,
        head=head,
        routers=experts.routers(model),
        shared=_shared(model, [name for name in shapes if name != head]),
        largest={name: each for name in shapes if (each := (largest or {}).get(f"{name}.weight")) is not None},
        apart=apart,
        model=type(model).__name__,
    )
    if head is not None and found.head is None:
        del shapes[head]
    return Layers(
        shapes,
        found.schemes,
        frozenset(plain),
        found.decisions,
        found.head,
        tied if found.head is not None else frozenset(),
        found.activations,
        frozenset(merged),
    )


def _shared(model: nn.Module, linears: Sequence[str]) -> dict[str, str]:
    """Linears that have their weight in common with another one -> that one."""
    owners: dict[int, list[str]] = {}
    for name in linears:
        owners.setdefault(id(model.get_submodule(name).weight), []).append(name)
    return {
        name: next(other for other in names if other != name)
        for names in owners.values()
        if len(names) > 1
        for name in names
    }
