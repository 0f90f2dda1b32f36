"""Decide how each linear of a model is stored, and account for every tensor of the source.

A linear weight multiplies activations as a matrix: the weights of linears, of merged experts, and any other parameter
of two or more dimensions that is neither an embedding table nor a convolution nor a norm. "4 bits per weight" leaves
out the linear weights that stay in floats. If more than 5 % do so without the recipe's asking, a warning comes before
the work, and an error under `--strict`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import nn

from quantkit.bundle import Decision, LayerEntry, WeightsEntry, decision
from quantkit.exporters import LayerSpec
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.activation import InputScale
from quantkit.model.structure import experts
from quantkit.model.structure.names import drafts
from quantkit.model.structure.traced import find_head, is_linear, is_vision_language, text_stack, weight_of
from quantkit.passes import NOTE
from quantkit.planning.assigned import (
    AS_ASKED,
    ASKED,
    EXPERTS_KEPT,
    FLOATS,
    FLOATS_LIMIT,
    ROUTER,
    TOWER,
    assign,
    takes_head,
)
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.model.streaming.stream import StreamedModel

QUANTIZED: Literal["quantized"] = "quantized"
_HEAD = "the recipe keeps the head"


class _Fate(NamedTuple):
    """Fate of a tensor: quantized, carried over or unused."""

    state: Literal["quantized", "carried", "unused"]
    reason: str
    linear: bool
    asked: bool


def account(
    stream: StreamedModel, quantized: Collection[str], decisions: Sequence[Decision], *, head: bool
) -> list[WeightsEntry]:
    """Account for every tensor of the source's files, those of one reason together.

    Args:
        quantized: full names of its linears with codes.
        decisions: taken so far; those on a linear are its reason.
        head: whether the recipe stores the head in its scheme.
    """
    modules = dict(stream.skeleton.named_modules())
    reasons = {taken.where: taken for taken in reversed(decisions)}  # the first: passes only add notes
    users: dict[str, list[str]] = {}
    for name, file in stream.files.items():
        users.setdefault(file, []).append(name)
    sums: dict[_Fate, list[tuple[str, int]]] = {}
    for file, entry in stream.source.weights.entries.items():
        names = users.get(file, [])
        reason = f"{stream.source.architecture} has no such parameter"
        if not names and drafts(stream.skeleton, file):  # type: ignore[arg-type]
            reason = "it drafts tokens (multi-token prediction), and is carried in floats"
        fate = _Fate("unused", reason, False, False)
        owners = {name.rpartition(".")[0]: name for name in reversed(names)}
        wanted = [owner for owner in owners if owner in quantized or (head and owner == stream.head)]
        # of a tensor that several parameters share, the one that the recipe is about; else the embedding
        wanted += [owner for owner in owners if isinstance(modules[owner], nn.Embedding)]
        chosen = owners[wanted[0]] if wanted else next(iter(names), "")
        if chosen:
            fate = _fate(chosen, modules, quantized, reasons, stream, head=head)
        sums.setdefault(fate, []).append((file, math.prod(entry.shape)))
    return _entries(sums)


def account_graph(model: ir.Model, quantized: Collection[str], decisions: Sequence[Decision]) -> list[WeightsEntry]:
    """Account for the weights of a float ONNX graph's products, and its tables of embeddings.

    Args:
        quantized: names of its products with codes; one that no decision speaks of either is kept by the recipe.
    """
    from quantkit.graph.sites import ZEROS, left_in_floats, sites

    reasons = {taken.where: taken for taken in decisions if taken.code != NOTE}
    sums: dict[_Fate, list[tuple[str, int]]] = {}
    for site in sites(model):
        fate, taken = _Fate(QUANTIZED, "", True, True), reasons.get(site.name)
        if site.name not in quantized:
            reason, asked = (taken.reason, taken.code in ASKED) if taken else ("the recipe keeps it", True)
            fate = _Fate("carried", reason, True, asked)
        sums.setdefault(fate, []).append((site.name, site.weight.size))
    for left in left_in_floats(model):
        fate = _Fate("carried", left.reason or "embeddings", bool(left.reason), left.reason in ("", ZEROS))
        sums.setdefault(fate, []).append((left.name, left.elements))
    return _entries(sums)


def _entries(sums: Mapping[_Fate, list[tuple[str, int]]]) -> list[WeightsEntry]:
    return [
        WeightsEntry(
            **fate._asdict(),
            tensors=len(tensors),
            elements=sum(count for _, count in tensors),
            example=max(tensors, key=lambda tensor: tensor[1])[0],
        )
        for fate, tensors in sorted(sums.items())
    ]


def _fate(
    name: str,
    modules: Mapping[str, nn.Module],
    quantized: Collection[str],
    reasons: Mapping[str, Decision],
    stream: StreamedModel,
    *,
    head: bool,
) -> _Fate:
    owner, _, leaf = name.rpartition(".")
    module = modules[owner]
    if owner in quantized and leaf == "weight":
        return _Fate(QUANTIZED, "", True, True)
    if beside := no_product(module, leaf):
        return _Fate("carried", beside, False, True)
    if not head and owner == find_head(stream.skeleton):  # a masked language model's too, which no recipe quantizes
        return _Fate("carried", _HEAD, False, True)
    taken = reasons.get(owner)
    if taken is not None:
        return _Fate("carried", taken.reason, True, taken.code in (AS_ASKED, ROUTER, EXPERTS_KEPT))
    if is_vision_language(stream.skeleton) and not name.startswith(text_stack(stream.skeleton)):
        return _Fate("carried", TOWER, True, True)
    if not is_linear(module):
        return _Fate("carried", f"a parameter of {type(module).__name__}, which is no linear", True, False)
    inside = any(name.startswith(f"{block}.") for block in stream.block_names)
    return _Fate("carried", "it was not decided on" if inside else "it lies outside the blocks", True, False)


def no_product(module: nn.Module, leaf: str) -> str:
    """Name the use of a parameter other than in a matrix product; empty for a linear weight."""
    value = getattr(module, leaf)
    if value.dim() < 2 or min(value.shape[-2:]) == 1 or leaf.endswith("bias"):
        return "norms, biases and scalars"
    if isinstance(module, nn.Embedding) or "embed" in f"{leaf} {type(module).__name__}".lower():
        return "embeddings"
    return "convolutions" if type(module).__name__.startswith("Conv") and not is_linear(module) else ""


def left_in_floats(entries: Iterable[WeightsEntry], *, unasked: bool = False) -> float | None:
    """Return the share of linear weights that stay in floats, 0 to 1; `unasked`: of those that nobody asked for.

    None where there are no linear weights, or nothing is quantized.
    """
    linear = [entry for entry in entries if entry.linear]
    whole = sum(entry.elements for entry in linear)
    left = [entry for entry in linear if entry.state != QUANTIZED and not (unasked and entry.asked)]
    if not whole or not any(entry.state == QUANTIZED for entry in linear):
        return None
    return sum(entry.elements for entry in left) / whole


def about(entries: Sequence[WeightsEntry]) -> list[Decision]:
    """Record the weights left in floats unasked, if they are too many."""
    share = left_in_floats(entries, unasked=True)
    if share is None or share <= FLOATS_LIMIT:
        return []
    left = [entry for entry in entries if entry.linear and entry.state != QUANTIZED and not entry.asked]
    most = max(left, key=lambda entry: entry.elements)
    reason = f"{share:.0%} of the linear weights stay in floats, most of them like {most.example}: {most.reason}"
    return [decision("recipe", FLOATS, "linear weights", reason, None, round(share, 4))]


@dataclass(frozen=True)
class Layers:
    """The linears inside the blocks, and the head if it is to be quantized.

    Attributes:
        shapes: full name -> [N, K] of all of them.
        schemes: full name -> scheme of those to quantize.
        plain: full names of those that are `torch.nn.Linear`; only these load quantized in other libraries.
        decisions: layers kept in high precision against the default, and departures from the scheme.
        head: name of the language-model head, if it is to be quantized.
        tied: the same, if it shares its weight with the embedding.
        activations: full name -> scheme of a quantized input; the names are in `schemes` and never the head's.
        merged: names of experts' linears.
        ruled: those of them that transformers merges while it loads them.
        tower: linears of a tower of images and its projector that the recipe names; rounded to nearest.
    """

    shapes: Mapping[str, tuple[int, int]]
    schemes: Mapping[str, WeightScheme]
    plain: frozenset[str]
    decisions: Sequence[Decision]
    head: str | None = None
    tied: frozenset[str] = frozenset()
    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    merged: frozenset[str] = frozenset()
    ruled: frozenset[str] = frozenset()
    tower: frozenset[str] = frozenset()

    @property
    def inside(self) -> Mapping[str, tuple[int, int]]:
        """`shapes` of the linears inside the blocks."""
        return {name: shape for name, shape in self.shapes.items() if name != self.head and name not in self.tower}

    @property
    def widest(self) -> int:
        """Largest number of input or output features of a linear inside the blocks."""
        return max((max(shape) for shape in self.inside.values()), default=1)

    def padded(self) -> list[str]:
        """Name the layers with a last group filled up with zeros."""
        return [name for name, scheme in self.schemes.items() if scheme.padding(self.shapes[name][1])]

    def asked(self, *, partly: bool = False, cache: CacheScheme | None = None) -> LayerSpec:
        """Return the demands of a compile of these layers on an export."""
        stored = (self.schemes, self.plain, self.padded(), self.tied, self.shapes, self.merged)
        return LayerSpec(*stored, partly, self.activations, cache, ruled=self.ruled)

    def entry(
        self, name: str, tensor: QuantTensor, error: float | None, static: InputScale | None = None
    ) -> LayerEntry:
        """Describe a quantized layer for the manifest.

        Args:
            error: its relative squared weight error.
            static: the fixed scale of its input.
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
        block_names: paths of the blocks; `""` for a model that is one block.
        dtype: what the source stores; bfloat16 models read bfloat16 scales.
        head: a decoder's language-model head, by its name; quantized unless the recipe keeps it. None leaves it out.
        largest: parameter -> its largest magnitude, of those that were looked at.

    Raises InputError: `override-unmatched`, `keep-unmatched`, `group-indivisible`, `nothing-to-quantize`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    plain, merged, ruled = set(), set(), set[str]()
    apart: dict[str, bool] = {}
    owners: dict[int, list[str]] = {}  # linears with one weight in common
    for block in block_names:
        for path, module in model.get_submodule(block).named_modules():
            name = f"{block}.{path}" if block else path
            if isinstance(module, experts.Experts):
                weights = {part for leaf in module.by_rule for part in experts.parts_of(module, name, leaf)}
                ruled |= {weight.removesuffix(".weight") for weight in weights}
            if isinstance(module, experts.Expert):
                merged |= {f"{name}.{leaf}" for leaf, _ in module.named_children()}
            if is_linear(module):
                rows, columns = weight_of(module).shape
                shapes[name] = (rows, columns)
                owners.setdefault(id(module.weight), []).append(name)
                if isinstance(module, nn.Linear):
                    plain.add(name)
            elif any(not no_product(module, leaf) for leaf, _ in module.named_parameters(recurse=False)):
                apart[name] = experts.is_merged(module)
    tower = {name: module for name, module in _tower(model).items() if _is_named(name, recipe, shapes)}
    shapes |= {name: (module.out_features, module.in_features) for name, module in tower.items()}
    plain |= tower.keys()
    if not takes_head(recipe):
        head = None
    tied = frozenset[str]()
    if head is not None:
        weight = model.get_parameter(f"{head}.weight")
        shapes[head] = (weight.shape[0], weight.shape[1])
        plain.add(head)
        others = (value for name, value in model.named_parameters(remove_duplicate=False) if name != f"{head}.weight")
        tied = frozenset([head] if any(value is weight for value in others) else [])
    shared = [names for names in owners.values() if len(names) > 1]
    magnitudes = {name: (largest or {}).get(f"{name}.weight") for name in shapes}
    chosen = assign(
        recipe,
        shapes,
        dtype,
        head=head,
        routers=experts.routers(model),
        shared={name: next(other for other in names if other != name) for names in shared for name in names},
        largest={name: value for name, value in magnitudes.items() if value is not None},
        apart=apart,
        tower=tower,
        model=type(model).__name__,
    )
    if head is not None and chosen.head is None:
        del shapes[head]
        tied = frozenset()
    mixed = (frozenset(merged), frozenset(ruled))
    more = (chosen.decisions, chosen.head, tied, chosen.activations, *mixed, frozenset(tower))
    return Layers(shapes, chosen.schemes, frozenset(plain), *more)


def _tower(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a vision-language model beside its text stack and head."""
    if not is_vision_language(model):
        return {}
    stack, head = text_stack(model), find_head(model)
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: module for name, module in linears if not name.startswith(stack) and name != head}


def _is_named(name: str, recipe: Recipe, inside: Collection[str]) -> bool:
    """Tell whether an override speaks of a linear of the tower: one whose glob matches no linear inside the blocks."""
    globs = (change.match for change in recipe.overrides if change.weights is not None)
    return any(fnmatchcase(name, glob) and not any(fnmatchcase(other, glob) for other in inside) for glob in globs)
