"""What the passes see of real life: the inputs of each shared input, while a block runs on the calibration set.

A run is *staged*: when execution reaches the first linear of a shared input, its statistics are complete and the pass
may change the linears before they run, so that what follows in the block already sees quantized linears. If all
sequences fit into one forward, the forward simply pauses there, and one run serves all stages and yields the block's
output as well. Else every stage replays the block up to its point, chunk by chunk, so that memory stays bounded.

The *original stream* is what the unquantized model would feed the block. If a pass asks for it, the block's original
weights run on it in step, and the statistics also say how far the inputs have drifted from the original ones, and how
far what a linear's output is added to lags behind; there, tokens count by how much an error of theirs matters to it.

Experts: one that calibration hardly ever routes to has no Hessian worth the name. It is *forced*, calibrated on all
tokens that reach its layer with its output left out, or *kept* in high precision. Tokens are counted with the block's
weights as they came.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.calibrate.statistics.scales import Scales, samples_of
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.model.streaming.calls import Calls
from quantkit.model.structure.experts import Experts, found_in
from quantkit.model.structure.traced import SharedInput, hooked


class _Reached(Exception):
    """Ends a replay at the shared input it was for."""


Found = TypeVar("Found")
Visit = Callable[[SharedInput, InputStats], None]
Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]


def _first(module: nn.Module, group: SharedInput, hook: Hook) -> RemovableHandle:
    """Return a pre-hook of a group's first linear, before the one that quantizes its input."""
    return module.get_submodule(group.name).register_forward_pre_hook(hook, prepend=True)


@dataclass
class Original:
    """A block as it came, with its original weights up to exact folds, on what the unquantized model feeds it.

    Args:
        hidden: [samples, tokens, width], its input.
        skips: linear -> the module whose input its output is added to (`model/structure/residual.py`).
        outputs: its output, once it has run.
    """

    module: nn.Module
    hidden: Tensor
    calls: Calls
    skips: Mapping[str, str] = field(default_factory=dict)
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Doubt:
    """Something that goes wrong hardly ever, on a device that is not waited for: looked at once a block.

    Args:
        values: on the device; one that is not finite says that it went wrong.
        again: whether the block is done again with this shared input's damping raised; else it is an error.
    """

    values: Tensor
    group: str
    again: bool


@dataclass
class Stats:
    """A block together with what it is run on.

    Args:
        groups: its shared inputs, in the order they run.
        stage: which of the calls.
        hidden: [samples, tokens, width], the block's input.
        outputs: the block's output, once a staged run has ended; passes that change weights afterwards reset it.
        original: the block in the original stream; None unless a pass asked for it.
        few: the calls of the first so many sequences alone; None: there are no others than `calls`.
        raised: shared input's name -> how often its damping was raised, where the block is done again.
        doubts: what is to be looked at when the block is done; empty on a CPU.
    """

    module: nn.Module
    groups: tuple[SharedInput, ...]
    calls: Calls
    stage: int
    hidden: Tensor
    outputs: Tensor | None = None
    original: Original | None = None
    few: Callable[[int], Calls] | None = None
    scales: Scales = field(default_factory=Scales)
    raised: Mapping[str, int] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    _unchecked: dict[str, Tensor] = field(default_factory=dict)

    def failed(self) -> list[Doubt]:
        """Those of the doubts that hold: one look at the device, and none where there are no doubts."""
        for name, values in self.scales.checked.items():
            self.doubt(values, name, again=False)
        self.scales.checked.clear()
        if not self.doubts or math.isfinite(torch.cat([doubt.values for doubt in self.doubts]).sum().item()):
            return []
        return [doubt for doubt in self.doubts if not bool(torch.isfinite(doubt.values).all())]

    def doubt(self, values: Tensor, group: str, *, again: bool) -> None:
        """To be looked at when the block is done; on a CPU it was looked at already."""
        if values.is_cuda:
            self.doubts.append(Doubt(values, group, again))

    def _visited(self, visit: Visit, group: SharedInput, sums: InputStats) -> None:
        doubts = len(self.doubts)
        visit(group, sums)
        if self.calls.device.type != "cpu":
            if group.name in self.raised:  # or was it the inputs, which no damping helps
                self.doubt(sums.squares, group.name, again=False)
            elif len(self.doubts) == doubts:  # else what was made of them is looked at
                self._unchecked[group.name] = sums.checked

    @torch.no_grad()
    def staged(
        self,
        visit: Visit | None,
        *,
        products: bool = True,
        noise: bool = False,
        drift: bool = False,
        quantized: bool = False,
        whole: bool = True,
    ) -> None:
        """Run the block on everything; at each shared input call `visit(group, statistics)` before its linears run.

        Args:
            visit: may change the linears of the group; None only runs the block.
            products: whether the statistics are to hold a Hessian.
            noise: whether they are to say how much of it is chance.
            drift: whether they are to hold how far inputs, and what outputs are added to, are from the original ones.
            quantized: the statistics are of the inputs as the group's kernels will see them, keys and values go through
                the cache's format, and fixed scales that are missing are found on the way. It is for the pass that
                assigns codes: others look at what they may still change.
            whole: whether the block runs to its end; else to the last shared input, and leaves no output.

        Raises:
            InputError: `activations-nonfinite`, naming the linear.
        """
        self.outputs = None
        self.scales.use_cache(quantized)
        sums = partial(InputStats, products=products, noise=noise)
        run = self._pausing if self.hidden.shape[0] <= self.calls.chunk else self._replaying
        run(visit, sums, drift, quantized, whole)
        if self._unchecked:  # of what was seen in one run, in one launch; a view would keep a Hessian until the end
            sizes = [len(values) for values in self._unchecked.values()]
            together = torch.cat(list(self._unchecked.values())).split(sizes)
            for name, values in zip(self._unchecked, together, strict=True):
                self.doubt(values, name, again=False)
            self._unchecked.clear()

    def each(
        self, of: Callable[[InputStats], Found], *, products: bool = True, sequences: int | None = None
    ) -> dict[str, Found]:
        """Map shared inputs to what `of` takes of their statistics, by a staged run that changes nothing.

        Args:
            sequences: number of sequences to run, the first ones; None: all.
        """
        taken: dict[str, Found] = {}
        stats = self
        if sequences is not None and sequences < len(self.hidden):
            few = self.calls if self.few is None else self.few(sequences)
            stats = replace(self, hidden=self.hidden[:sequences], calls=few)
        stats.staged(lambda group, seen: taken.update({group.name: of(seen)}), products=products, whole=False)
        self.outputs = None
        return taken

    def settled(self) -> Tensor:
        """Return the block's output with its present weights, [samples, tokens, width], inputs and cache quantized."""
        if self.scales.waits:
            self.staged(None, quantized=True)
        if self.scales.use_cache(True) or self.outputs is None or self.calls.live:
            # a live model's next block is given what this very run leaves behind
            self.outputs = self.calls.run_all(self.module, self.stage, self.hidden)
        return self.outputs

    def original_outputs(self) -> Tensor:
        """Return what the block puts out in the unquantized model, [samples, tokens, width]."""
        original = self._original()
        if original.outputs is None:
            original.outputs = original.calls.run_all(original.module, self.stage, original.hidden)
        return original.outputs

    def _pausing(
        self, visit: Visit | None, empty: Callable[..., InputStats], drift: bool, quantized: bool, whole: bool
    ) -> None:
        waiting = {group.name: group for group in self.groups}
        sources = self._sources() if drift else ()
        before = self._originals() if drift else {}
        seen: dict[str, Tensor] = {}

        def pause(group: SharedInput) -> Hook:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                if waiting.pop(group.name, None) is None:
                    return
                found = args[0]
                if quantized:
                    self.scales.at_once(group, found)
                    found = self.scales.seen(group, found)
                if visit is not None:
                    sums = empty(name=group.name)
                    self._add(sums, group, self.hidden, {**seen, group.name: found}, before)
                    if group.name not in sources:  # as soon as it is not needed
                        before.pop(group.name, None)
                    self._visited(visit, group, sums)
                if not (waiting or whole):
                    raise _Reached

            return hook

        hooks = self._keeping(self.module, seen, sources)
        hooks += [_first(self.module, group, pause(group)) for group in self.groups]
        watching = self.scales.watching_cache(whole=True) if quantized else nullcontext()
        with hooked(hooks), watching, suppress(_Reached):
            self.outputs = self.calls.run(self.module, self.stage, self.hidden)

    def _originals(self) -> dict[str, Tensor]:
        """What each shared input, and whatever outputs are added to, hold in the original stream: one forward."""
        original, kept = self._original(), dict[str, Tensor]()
        hooks = self._keeping(original.module, kept, (*(group.name for group in self.groups), *self._sources()))
        with hooked(hooks):
            original.outputs = original.calls.run(original.module, self.stage, original.hidden)
        return kept

    def _replaying(
        self, visit: Visit | None, empty: Callable[..., InputStats], drift: bool, quantized: bool, whole: bool
    ) -> None:
        befores: Iterable[Tensor | None]
        for group in self.groups:
            if quantized:
                self._find_scales(group)
            if visit is None:
                continue
            sums = empty(name=group.name)
            befores = self._original().calls.chunks(self._original().hidden) if drift else itertools.repeat(None)
            for number, (part, before) in enumerate(zip(self.calls.chunks(self.hidden), befores, strict=False)):
                reached = self._reach(self.module, group, part, number, drift)
                if group.name in reached:
                    if quantized:
                        reached[group.name] = self.scales.seen(group, reached[group.name])
                    others: dict[str, Tensor] = {}
                    if before is not None:
                        original = self._original()
                        others = self._reach(original.module, group, before, number, drift, original.calls)
                    self._add(sums, group, part, reached, others)
            if sums.tokens:  # as when pausing: what nothing reaches is not visited
                self._visited(visit, group, sums)
        if quantized and self.scales.cache_waits:  # no linear comes after the cache
            with self.scales.watching_cache(whole=False):
                self.calls.run_all(self.module, self.stage, self.hidden)
        if whole:
            self.outputs = self.calls.run_all(self.module, self.stage, self.hidden)

    def _find_scales(self, group: SharedInput) -> None:
        """The fixed scales that are missing up to a group, by replays: of the cache, then of the group's inputs."""
        if self.scales.cache_waits:
            with self.scales.watching_cache(whole=False):
                for number, part in enumerate(self.calls.chunks(self.hidden)):
                    self._reach(self.module, group, part, number, False)
        if self.scales.waiting(group):
            observed = self.scales.observed(group)
            for number, part in enumerate(self.calls.chunks(self.hidden)):
                reached = self._reach(self.module, group, part, number, False)
                if group.name in reached:
                    values = self.scales.moved(group, reached[group.name])
                    observed.add(values.reshape(1, -1), samples_of(values))
            self.scales.settle(group, observed)

    def _reach(
        self, module: nn.Module, group: SharedInput, part: Tensor, number: int, drift: bool, calls: Calls | None = None
    ) -> dict[str, Tensor]:
        """Return what a shared input, and what runs before it, hold when one chunk runs, up to there."""
        found: dict[str, Tensor] = {}

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[group.name] = args[0]
            raise _Reached

        hooks = self._keeping(module, found, self._sources() if drift else ())
        hooks.append(_first(module, group, stop))
        with hooked(hooks), suppress(_Reached):
            (calls or self.calls).run(module, self.stage, part, number)
        return found

    def _add(
        self,
        sums: InputStats,
        group: SharedInput,
        part: Tensor,
        here: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
    ) -> None:
        """Add what a shared input holds in both streams; `part` is the block's input that led to it."""

        # an expert's tensors hold other tokens in each stream, so only those that hold every token are compared
        def whole(name: str) -> bool:
            both = name in here and name in before and here[name].shape == before[name].shape
            return both and here[name].numel() // here[name].shape[-1] == part.numel() // part.shape[-1]

        original = self.scales.moved(group, before[group.name]) if whole(group.name) else None
        sources = {} if original is None or self.original is None else self.original.skips
        added = {linear: sources[linear] for linear in group.members if linear in sources and whole(sources[linear])}
        lags = {linear: before[name] - here[name] for linear, name in added.items()}
        stream = here[next(iter(added.values()))] if added else None
        sums.add(here[group.name], original, lags, stream)

    def _sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._original().skips.values()))

    def _keeping(self, module: nn.Module, kept: dict[str, Tensor], names: Iterable[str]) -> list[RemovableHandle]:
        """Hooks that keep what the modules are given first."""

        def keep(name: str) -> Hook:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                kept.setdefault(name, args[0])

            return hook

        # before what quantizes an input, or moves its channels: the residual stream is not quantized
        return [
            module.get_submodule(name).register_forward_pre_hook(keep(name), prepend=True)
            for name in dict.fromkeys(names)
        ]

    def _original(self) -> Original:
        assert self.original is not None, "a pass that looks at the original stream says so in `needs`"
        return self.original


class _Counted(Exception):
    """Ends a run behind the last experts."""


@torch.no_grad()
def count(block: nn.Module, calls: Calls, stage: int, hidden: Tensor) -> dict[str, int]:
    """Expert -> the calibration tokens [samples, tokens, width] that are routed to it; empty for a block without
    experts.
    """
    layers = found_in(block)
    if not layers:
        return {}
    counts = {
        path: torch.zeros(len(experts), dtype=torch.int64, device=calls.device) for path, experts in layers.items()
    }

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            counts[path] += torch.bincount(args[1].flatten(), minlength=len(counts[path]))
            if len(layers) == 1:
                raise _Counted

        return hook

    with hooked(experts.register_forward_pre_hook(note(path)) for path, experts in layers.items()):
        for number, part in enumerate(calls.chunks(hidden)):
            with suppress(_Counted):
                calls.run(block, stage, part, number)
    return {f"{path}.{number}": int(seen) for path, row in counts.items() for number, seen in enumerate(row.tolist())}


def force(block: nn.Module, names: list[str]) -> None:
    """From now on these experts of a block run on every token, for whoever watches their inputs."""
    for path, experts in found_in(block).items():
        numbers = [name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")]
        experts.forced = frozenset(int(number) for number in numbers)


def expert_of(linear: str, block: nn.Module) -> str | None:
    """Return the expert that a linear of a block belongs to: `mlp.experts.3.up_proj` -> `mlp.experts.3`."""
    owner = linear.rpartition(".")[0]
    path = owner.rpartition(".")[0]
    return owner if path and isinstance(block.get_submodule(path), Experts) else None
