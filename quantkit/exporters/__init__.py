"""Exporters, one destination a folder: write a model, load it again in other people's code, compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from quantkit.errors import InputError
from quantkit.plugins import Kind, Stores

if TYPE_CHECKING:
    from quantkit.bundle import Check, Decision, LayerEntry
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.own_forward import Answering
    from quantkit.model.structure.names import Obstacle
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
    from quantkit.stats.abba import Comparison
    from quantkit.target import State, Target


# callback for the share done and the current work
BuildReport = Callable[[float, str], None]
# (a model, another one, inputs for both) -> speed of the first relative to the second on this machine
Trial = Callable[[bytes, bytes, Mapping[str, Any]], "Comparison"]


@dataclass(frozen=True)
class LayerSpec:
    """Layers of a model, or of a recipe, before any work is done on them.

    Args:
        schemes: linear, or place in the recipe (`scheme`, `overrides: *.o_proj`) -> scheme of its weight.
        plain: linears that are `torch.nn.Linear`.
        padded: linears with a padded last group.
        tied: head that shares its weight with the embedding.
        shapes: linear -> [N, K]; empty if unknown.
        merged: linears of experts.
        ruled: those of them that transformers merges while it loads them.
        apart: module of experts -> libraries with which transformers loads its linears one by one.
        class_name: class of the model.
        partly: whether calibration may leave some experts in high precision.
        activations: linear -> scheme of its input.
        obstacles: parts of the model that transformers would not load packed.
        source: the model; None for a finished bundle, and for a recipe.
        largest: parameter -> its largest magnitude, for those that were read.
        stacked: modules of experts that are one tensor, and stay in floats.
        untraced: class of a model whose attention cannot be traced; else empty.
        stateful: kind of layers that keep a state other than keys and values; else empty.
    """

    schemes: Mapping[str, WeightScheme] = field(default_factory=dict)
    plain: Collection[str] = ()
    padded: Collection[str] = ()
    tied: Collection[str] = ()
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    merged: Collection[str] = ()
    partly: bool = False
    activations: Mapping[str, ActivationScheme] = field(default_factory=dict)
    cache: CacheScheme | None = None
    obstacles: Sequence[Obstacle] = ()
    source: Source | None = None
    largest: Mapping[str, float] = field(default_factory=dict)
    stacked: Collection[str] = ()
    untraced: str = ""
    stateful: str = ""
    ruled: Collection[str] = ()
    apart: Mapping[str, Collection[str]] = field(default_factory=dict)
    class_name: str = ""

    def demand_graph(self, export: str) -> None:
        """Refuse a model beyond a single graph.

        Raises InputError: `layout-unsupported` for a mixture of experts, `attention-unsupported` for attention of a
        model's own; as `demand_one_stack`.
        """
        self.demand_one_stack(export)
        if self.untraced:
            value = "its attention does not go through transformers' AttentionInterface"
            rule = "only this interface shows what it computes, so that its cache can be exported"
            raise unattended(self.untraced, value, rule, without(export))
        if self.stateful:
            value, rule = f"keeps a state of its own: {self.stateful}", "a graph holds a cache of keys and values alone"
            raise unattended(self.class_name, value, rule, without(export))
        for linear in sorted({*self.merged, *self.stacked})[:1]:
            rule = "the graph is traced once, and which expert runs depends on the data"
            raise unheld(linear, "belongs to a mixture of experts", rule, without(export))
        self.demand_text(export)

    def demand_text(self, export: str) -> None:
        """Refuse a vision-language model for an export of token ids alone. Raises InputError `layout-unsupported`."""
        if self.source is not None and self.source.sees:
            value, rule = "takes images too", f"an export to {export} holds a model of text alone"
            raise unheld(self.source.architecture, value, rule, without(export))

    def demand_one_stack(self, export: str) -> None:
        """Refuse a decoder beside an encoder. Raises InputError `architecture-unsupported`."""
        if self.source is not None and self.source.has_encoder:
            name, rule = self.source.architecture, f"`{export}` holds one stack of blocks"
            raise InputError("architecture-unsupported", name, "an encoder and a decoder", rule, without(export))

    def demand_float_cache(self, export: str) -> None:
        """Refuse a quantized KV cache. Raises InputError `layout-unsupported`."""
        if self.cache is not None:
            value, rule = f"a KV cache in {self.cache.format}", "this exporter's cache is in float32"
            raise unheld("scheme.kv_cache", value, rule, without(export))


class Exporter(Protocol):
    """Interface of one destination, with defaults. `options` are always its `Options`.

    Attributes:
        name: name in recipes; the name of the folder.
        runtimes: runtimes that read its output.
        fuses: whether it gains from linears that are stored as one.
        moves: whether it can hold inputs whose channels are moved before they are quantized.
        stacks: number of stacks of blocks that it can hold: 2 for an encoder and a decoder.
        adds: whether it can also export the checkpoint of a finished bundle.
        place: folder of a bundle that it writes.
        weights: suffix of its files of weights, if no table of bundles knows the folder.
        reads_graphs: whether it can also export the graph of a finished bundle: `add_graph`, `check_graph`.
        builds: whether something is compiled from its checked output: `build`.
        classes: classes of transformers that it supports; none: any.
        stores: kind of output: plans count bytes and checks by it.
        Options: closed pydantic model of its options.
    """

    name: str
    runtimes: tuple[str, ...]
    fuses: bool = False
    moves: bool = False
    stacks: int = 1
    adds: bool = False
    place: str = ""
    weights: tuple[str, ...] = ()
    reads_graphs: bool = False
    builds: bool = False
    classes: Collection[str] = ()
    stores: Stores
    Options: type[BaseModel]

    def accepts(self, options: Any, asked: LayerSpec) -> None:
        """Refuse, before any work, layers that the destination cannot hold.

        Raises InputError: `layout-unsupported`, naming the first layer; MissingDependency: a library for writing it.
        """

    def holds(self, options: Any, runtime: str, asked: LayerSpec) -> State:
        """Return the support of a runtime for a recipe's formats as the export stores them; needs no model.

        Returns:
            `native` if nothing is lost, `emulated` if floats are stored.

        Raises InputError: `layout-unsupported`, if it cannot be stored so, or if the runtime has no kernel for it.
        """
        ...

    def storage(self, options: Any, laid: LaidOver) -> Storage:
        """Predict the bytes of the export; by default of every tensor as a value.

        Raises InputError: `layout-unsupported`.
        """
        return laid.tensors(None)

    def for_target(
        self, options: Any, target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """Choose the target's options: the changed ones, and a sentence about them or "".

        Args:
            trial: function that times graphs here; None if the target is another machine.
        """
        return {}, ""

    def for_prompts(self, options: Any, target: Target, layers: Sequence[LayerEntry]) -> str:
        """Name the setting, `PATH=VALUE`, for faster prompts and large batches than with these layers; "" if none."""
        return ""

    def packs(self, options: Any) -> bool:
        """Tell whether it stores codes, and not the values of the codes in floats."""
        return True

    def for_floats(self, options: Any) -> Any:
        """Return the options for exporting the unquantized model, the reference for times."""
        return options

    def caveat(self, options: Any, runtime: str) -> str:
        """Describe needs or deviations of a runtime that reads the export; "" if there are none."""
        return ""

    def export(self, folder: Path, values: Values, options: Any) -> list[Decision]:
        """Write everything of a model into `folder`; return the deviations from what was asked.

        Raises InputError: the exporter's own; Stopped: `disk-full`.
        """
        ...

    def held(self, values: Values, options: Any) -> Values:
        """Return the model with the values of the export: they differ from those of the codes if more is rounded."""
        return values

    def check(
        self,
        bundle: Path,
        values: Values | None = None,
        options: Any = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        blocks: int | None = None,
        beside: Answering | None = None,
    ) -> list[Check]:
        """Load the export in other people's code and compare it with the expected values.

        Args:
            values, options: as for `export`; without them, the checkpoint of the finished bundle gives the expected
                values.
            inputs: keyword arguments of a forward; a fixed batch of ids by default.
            blocks: number of layers whose outputs are compared, if the exporter can limit it.
            beside: answers to keep of the whole model as transformers loads the export; for exporters of `tensors`.
        """
        ...

    def add_graph(self, graph: Path, folder: Path, options: Any) -> list[Decision]:
        """Export a graph with its Q/DQ pairs, as written for ONNX Runtime. For exporters with `reads_graphs`."""
        raise AssertionError(f"{self.name} reads no graphs")

    def check_graph(self, graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
        """Compare the result of `add_graph` with the graph, on some samples."""
        raise AssertionError(f"{self.name} reads no graphs")

    def build(self, bundle: Path, options: Any, progress: BuildReport | None = None) -> dict[str, str]:
        """Compile the checked export. For exporters with `builds`.

        Returns:
            path in the bundle -> hash of a built file, which may be run before there is a manifest; empty if it was
            told to build nothing.
        """
        raise AssertionError(f"{self.name} builds nothing")


load_exporter = Kind[Exporter]("exporters").load


def reader(name: str, options: Mapping[str, Any]) -> str:
    """Name the runtime for an exporter's output: the library in its options, else its first runtime."""
    runtimes = load_exporter(name).runtimes
    asked = options.get("library")
    return str(asked if asked in runtimes else runtimes[0])


def unheld(where: str, value: str, rule: str, remedy: str) -> InputError:
    """Make the error `layout-unsupported`, for a destination that cannot hold something."""
    return InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=remedy)


def unattended(where: str, value: str, rule: str, remedy: str) -> InputError:
    """Make the error `attention-unsupported`, for attention that no graph can hold."""
    return InputError("attention-unsupported", where=where, value=value, rule=rule, remedy=remedy)


# remedy for experts with zero points: transformers reads none
SYMMETRIC = "--set scheme.weights.symmetric=true"


def without(export: str) -> str:
    """Write the remedy for a model that an export cannot hold."""
    return f"leave `{export}` out of `export`"
