"""Exporters, one destination a folder: write it, load it again in other people's code, compare."""

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
    from quantkit.model.structure.names import Obstacle
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
    from quantkit.stats.abba import Comparison
    from quantkit.target import State, Target


# told the share that is done, and what is being done
BuildReport = Callable[[float, str], None]
# (a model, another one, values for the inputs of both) -> how many times as fast the first is on this machine
Trial = Callable[[bytes, bytes, Mapping[str, Any]], "Comparison"]


@dataclass(frozen=True)
class LayerSpec:
    """The layers of a model, or of a recipe, before any work is done on them.

    Args:
        schemes: linear, or where a recipe says so (`scheme`, `overrides: *.o_proj`) -> how its weight is stored.
        plain: the linears that are `torch.nn.Linear`.
        padded: the linears whose last group is filled up.
        tied: a head that shares its weight with the embedding.
        shapes: linear -> [N, K]; empty where nobody knows.
        merged: the linears of experts, which transformers merges while it loads them.
        partly: whether calibration may leave some experts in high precision.
        activations: linear -> how its input is quantized.
        obstacles: what transformers would not load of it packed.
        source: the model; None of a finished bundle, and of a recipe.
        largest: parameter -> its largest magnitude, of those that were looked at.
        stacked: modules of experts that are one tensor, and stay in floats.
        untraced: the class of a model whose attention no graph can be traced of; empty of any other.
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

    def demand_graph(self, export: str) -> None:
        """Refuse what no one graph can be traced of.

        Raises InputError: `layout-unsupported` for a mixture of experts, `attention-unsupported` for attention of a
        model's own.
        """
        if self.untraced:
            value = "its attention does not go through transformers' AttentionInterface"
            rule = "only then is it known what it computes, and its cache can be exported"
            raise unattended(self.untraced, value, rule, _without(export))
        for linear in sorted({*self.merged, *self.stacked})[:1]:
            rule = "the graph is traced once, and which expert runs depends on the data"
            raise unheld(linear, "belongs to a mixture of experts", rule, _without(export))

    def demand_float_cache(self, export: str) -> None:
        """Refuse a quantized KV cache. Raises InputError `layout-unsupported`."""
        if self.cache is not None:
            value, rule = f"a KV cache in {self.cache.format}", "this exporter's cache is in float32"
            raise unheld("scheme.kv_cache", value, rule, _without(export))


class Exporter(Protocol):
    """One destination; an exporter inherits what it does not declare. `options` are its `Options` everywhere.

    Attributes:
        name: as in recipes; the folder's name.
        runtimes: that read what it writes.
        fuses: whether it gains from linears that are stored as one.
        moves: whether it holds inputs whose channels are moved before they are quantized.
        adds: whether it exports a finished bundle's checkpoint, too.
        place: the folder of a bundle that it writes.
        weights: how the files of weights end that it writes there, if no table of bundles knows the folder.
        reads_graphs: whether it exports a finished bundle's graph, too: `add_graph`, `check_graph`.
        builds: whether something is compiled from what was written and checked: `build`.
        classes: of transformers that it writes models of; none: any.
        stores: what becomes of a model: plans count its bytes and its checks by that.
        Options: closed pydantic model of its options.
    """

    name: str
    runtimes: tuple[str, ...]
    fuses: bool = False
    moves: bool = False
    adds: bool = False
    place: str = ""
    weights: tuple[str, ...] = ()
    reads_graphs: bool = False
    builds: bool = False
    classes: Collection[str] = ()
    stores: Stores
    Options: type[BaseModel]

    def accepts(self, options: Any, asked: LayerSpec) -> None:
        """Refuse, before any work, what the destination cannot hold.

        Raises InputError: `layout-unsupported`, naming the first layer; MissingDependency: what it is written with.
        """

    def holds(self, options: Any, runtime: str, asked: LayerSpec) -> State:
        """Tell what the export leaves of what a runtime can do with the formats of a recipe; no model is needed.

        Returns:
            `native` where it leaves all of it, `emulated` where floats are stored.

        Raises InputError: `layout-unsupported`; it cannot be stored so, or that runtime has no kernel for it so.
        """
        ...

    def storage(self, options: Any, laid: LaidOver) -> Storage:
        """Predict the bytes of what it writes; by default of every tensor as a value.

        Raises InputError: `layout-unsupported`.
        """
        return laid.tensors(None)

    def for_target(
        self, options: Any, target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """Settle the options that depend on the target: those that change, and a word on that; "" where nothing does.

        Args:
            trial: times graphs here; None where the target is another machine.
        """
        return {}, ""

    def for_prompts(self, options: Any, target: Target, layers: Sequence[LayerEntry]) -> str:
        """Name the setting, `PATH=VALUE`, that makes prompts and large batches faster than with these layers; ""."""
        return ""

    def for_floats(self, options: Any) -> Any:
        """Return the options with which the unquantized model is exported, to be timed against."""
        return options

    def caveat(self, options: Any, runtime: str) -> str:
        """Tell what a runtime needs beside itself to read the export, or does otherwise than is stored; ""."""
        return ""

    def export(self, folder: Path, values: Values, options: Any) -> list[Decision]:
        """Write everything of a model into `folder`; return what was done otherwise than asked.

        Raises InputError: the exporter's own; Stopped: `disk-full`.
        """
        ...

    def held(self, values: Values, options: Any) -> Values:
        """Return the model with the values that the export holds: others than its codes' where more is rounded."""
        return values

    def check(
        self,
        bundle: Path,
        values: Values | None = None,
        options: Any = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        blocks: int | None = None,
    ) -> list[Check]:
        """Load what was written in other people's code and hold it against what was decided on.

        Args:
            values, options: as for `export`; without them, of a finished bundle, the expected values are those of its
                checkpoint.
            inputs: keyword arguments of a forward; a fixed batch of ids by default.
            blocks: compare the outputs of only so many layers, where the exporter can.
        """
        ...

    def add_graph(self, graph: Path, folder: Path, options: Any) -> list[Decision]:
        """Export a graph with its pairs, as it was written for ONNX Runtime. Of exporters with `reads_graphs`."""
        raise AssertionError(f"{self.name} reads no graphs")

    def check_graph(self, graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
        """Hold what `add_graph` wrote against the graph, on some samples."""
        raise AssertionError(f"{self.name} reads no graphs")

    def build(self, bundle: Path, options: Any, progress: BuildReport | None = None) -> dict[str, str]:
        """Compile what was written and checked. Of exporters with `builds`.

        Returns:
            the hashes of what was built, by path in the bundle: what may be run before there is a manifest; empty if
            it was told to build nothing.
        """
        raise AssertionError(f"{self.name} builds nothing")


load_exporter = Kind[Exporter]("exporters").load


def reader(name: str, options: Mapping[str, Any]) -> str:
    """Name the runtime that reads what an exporter writes: the library that its options name, else its first."""
    runtimes = load_exporter(name).runtimes
    asked = options.get("library")
    return str(asked if asked in runtimes else runtimes[0])


def unheld(where: str, value: str, rule: str, remedy: str) -> InputError:
    """Make `layout-unsupported`: a destination cannot hold something."""
    return InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=remedy)


def unattended(where: str, value: str, rule: str, remedy: str) -> InputError:
    """Make `attention-unsupported`: no graph holds such attention."""
    return InputError("attention-unsupported", where=where, value=value, rule=rule, remedy=remedy)


def _without(export: str) -> str:
    return f"leave `{export}` out of `export`"
