"""Exporters, one destination a folder: write it, load it again in other people's code, compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from quantkit.errors import InputError
from quantkit.plugins import ExporterFacts, Kind, Stores

if TYPE_CHECKING:
    from quantkit.bundle import Check, Decision, LayerEntry
    from quantkit.exporters.values import Values
    from quantkit.model.finished import Finished
    from quantkit.model.source.open import Source
    from quantkit.model.source.unloadable import Obstacle
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
    from quantkit.stats.abba import Comparison
    from quantkit.target import State, Target


# told the share that is done, and what is being done
BuildReport = Callable[[float, str], None]
# (a model, another one, values for the inputs of both) -> how many times as fast the first is on this machine
Trial = Callable[[bytes, bytes, Mapping[str, Any]], "Comparison"]


class Exporter(ExporterFacts, Protocol):
    """One destination; an exporter inherits what it does not declare.

    Attributes:
        name: as in recipes; the folder's name.
        runtimes: that read what it writes.
        fuses: whether it gains from linears that are stored as one.
        moves: whether it holds inputs whose channels are moved before they are quantized.
        adds: whether it exports a finished bundle's checkpoint, too: `add`.
        place: the folder of a bundle that it writes.
        reads_graphs: whether it exports a finished bundle's graph, too: `add_graph`, `check_graph`.
        builds: whether something is compiled from what was written and checked: `build`.
        classes: of transformers that it writes models of; none: any.
        stores: what becomes of a model, `plugins.Stores`: plans count its bytes and its checks by that.
        Options: closed pydantic model of its options.
    """

    name: str
    runtimes: tuple[str, ...]
    fuses: bool = False
    moves: bool = False
    adds: bool = False
    place: str = ""
    reads_graphs: bool = False
    builds: bool = False
    classes: Collection[str] = ()
    stores: Stores
    Options: type[BaseModel]

    def accepts(self, options: Mapping[str, Any], asked: LayerSpec) -> None:
        """Refuse, before any work, what the destination cannot hold.

        Raises:
            InputError: `layout-unsupported`, naming the first layer.
            MissingDependency: what it is written with.
        """
        ...

    def holds(
        self,
        options: Mapping[str, Any],
        runtime: str,
        weights: Mapping[str, WeightScheme],
        activations: Mapping[str, ActivationScheme],
        cache: CacheScheme | None,
    ) -> State:
        """What the export leaves of what a runtime can do with the formats of a recipe; no model is needed to say so.

        Args:
            options: of the recipe's export step.
            runtime: that will read it: one of `runtimes`.
            weights, activations: how they are quantized; keys are where a recipe says so: `scheme`,
                `overrides: *.o_proj`.
            cache: how keys and values are quantized.

        Returns:
            `native` where it leaves all of it, `emulated` where floats are stored.

        Raises:
            InputError: `layout-unsupported`; it cannot be stored so, or that runtime has no kernel for it so.
        """
        ...

    def for_target(
        self, options: Mapping[str, Any], target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """The options with what depends on the target settled, and a word on that; "" where nothing does.

        Args:
            asked: the layers of the model.
            trial: times graphs here; None where the target is another machine.
        """
        return options, ""

    def for_prompts(self, options: Mapping[str, Any], target: Target, layers: Sequence[LayerEntry]) -> str:
        """What to set, `PATH=VALUE`, for prompts and large batches to be faster than with these layers; ""."""
        return ""

    def for_floats(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options with which the unquantized model is exported, to be timed against: those its file depends on."""
        return options

    def caveat(self, options: Mapping[str, Any], runtime: str) -> str:
        """What a runtime needs beside itself to read the export, or does otherwise than is stored; "" where nothing."""
        return ""

    def write(
        self, bundle: Path, source: Source, stream: StreamedModel, results: Finished, options: Mapping[str, Any]
    ) -> list[Decision]:
        """Write the exporter's folder of a bundle; what was done otherwise than asked comes back.

        Raises:
            InputError: the exporter's own.
            Stopped: `disk-full`.
        """
        from quantkit.exporters.values import Values

        return self.export(bundle / self.place, Values.of_results(source, stream, results), options)

    def export(self, folder: Path, values: Values, options: Mapping[str, Any]) -> list[Decision]:
        """Write everything of a model, from a compile or a finished bundle, into `folder`."""
        raise AssertionError(f"{self.name} does not write a folder of its own")

    def held(self, values: Values, options: Mapping[str, Any]) -> Values:
        """A model with the values that the export holds: others than those of its codes where more of it is rounded."""
        return values

    def check(
        self,
        bundle: Path,
        source: Source | None = None,
        stream: StreamedModel | None = None,
        results: Finished | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        blocks: int | None = None,
    ) -> list[Check]:
        """Load what was written in other people's code and hold it against what was decided on.

        Args:
            bundle: its folder.
            source, stream, results, options: as for `write`. Without them, for a finished bundle, the expected values
                are those of its checkpoint.
            inputs: keyword arguments of a forward; a fixed batch of ids by default.
            blocks: compare the outputs of only so many layers, where the exporter can.
        """
        ...

    def add(self, bundle: Path, folder: Path, options: Mapping[str, Any]) -> list[Decision]:
        """Export a finished bundle's checkpoint into `folder`. Of exporters with `adds`.

        Raises:
            InputError: as `write`, and `bundle-without-checkpoint`, `bundle-dense`.
        """
        from quantkit.exporters.values import Values

        return self.export(folder, Values.of_bundle(bundle), options)

    def add_graph(self, graph: Path, folder: Path, options: Mapping[str, Any]) -> list[Decision]:
        """Export a graph with its pairs, as it was written for ONNX Runtime. Of exporters with `reads_graphs`."""
        raise AssertionError(f"{self.name} reads no graphs")

    def check_graph(self, graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
        """Hold what `add_graph` wrote against the graph, on some samples."""
        raise AssertionError(f"{self.name} reads no graphs")

    def build(self, bundle: Path, options: Mapping[str, Any], progress: BuildReport | None = None) -> dict[str, str]:
        """Compile what was written and checked. Of exporters with `builds`.

        Returns:
            the hashes of what was built, by path in the bundle: what may be run before there is a manifest; empty if
            it was told to build nothing.
        """
        raise AssertionError(f"{self.name} builds nothing")


load_exporter = Kind[Exporter]("exporters").load


def reader(name: str, options: Mapping[str, Any]) -> str:
    """The runtime that reads what an exporter writes: the library that its options name, else its first."""
    runtimes = load_exporter(name).runtimes
    asked = options.get("library")
    return str(asked if asked in runtimes else runtimes[0])


@dataclass(frozen=True)
class LayerSpec:
    """The layers of a model, before any work is done on them.

    Args:
        schemes: linear -> how its weight is stored.
        plain: the linears that are `torch.nn.Linear`.
        padded: the linears whose last group is filled up.
        tied: a head that shares its weight with the embedding.
        shapes: linear -> [N, K]; empty where nobody knows.
        merged: the linears of experts, which transformers merges while it loads them.
        partly: whether calibration may leave some experts in high precision.
        activations: linear -> how its input is quantized.
        cache: how keys and values are quantized.
        obstacles: what transformers would not load of it packed.
        source: the model; None of a finished bundle.
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

        Raises:
            InputError: `layout-unsupported` for a mixture of experts, `attention-unsupported` for attention of a
                model's own.
        """
        if self.untraced:
            raise InputError(
                "attention-unsupported",
                where=self.untraced,
                value="its attention does not go through transformers' AttentionInterface",
                rule="only then is it known what it computes, and its cache can be exported",
                remedy=f"leave `{export}` out of `export`",
            )
        for linear in sorted({*self.merged, *self.stacked})[:1]:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="belongs to a mixture of experts",
                rule="the graph is traced once, and which expert runs depends on the data",
                remedy=f"leave `{export}` out of `export`",
            )
