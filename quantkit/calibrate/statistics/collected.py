"""Statistics of each shared input, collected while a block runs on the calibration set.

A run is *staged*: when execution reaches the first linear of a shared input, its statistics are complete and the pass
may change the linears before they run, so that later parts of the block already see quantized linears. If all sequences
fit one forward, the forward pauses there, and one run serves all stages and also gives the block's output. Else every
stage replays the block up to its point, chunk by chunk, so that memory stays bounded. With ranks (`parts.py`), chunks
that fit the memory pause side by side, each forward in a greenlet.

The *original stream* is the input of the block in the unquantized model. If a pass needs it, the block's original
weights run on it in step, and the statistics also include the drift of the inputs from the original ones, and the lag
of the tensor to which a linear's output is added; there, tokens are weighted by the effect of an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit import machine
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics.parts import Piece, Share, pieces
from quantkit.calibrate.statistics.scales import Scales, samples_of
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.errors import InputError
from quantkit.formats import QuantTensor, joined
from quantkit.model.device import one_thread, spread
from quantkit.model.streaming.calls import Calls, gathered
from quantkit.model.structure.experts import found_in
from quantkit.model.structure.traced import SharedInput, hooked, weight_of


class _Reached(Exception):
    """Signal that ends a run at its shared input."""


# threads that inputs are worked on at the same time by, and features of one that takes all threads alone
_FEW, _LARGE = 4, 2048
T = TypeVar("T")
R = TypeVar("R")
Visit = Callable[[SharedInput, InputStats], None]
Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]


def _first(module: nn.Module, group: SharedInput, hook: Hook) -> RemovableHandle:
    """Add a pre-hook to a group's first linear, before the one that quantizes its input."""
    return module.get_submodule(group.name).register_forward_pre_hook(hook, prepend=True)


@dataclass
class Original:
    """A block with its original weights, up to exact folds, on its input in the unquantized model.

    Args:
        module: the block.
        hidden: its input, [samples, tokens, width].
        calls: its calls.
        skips: linear -> module whose input its output is added to (`model/structure/residual.py`).
        outputs: its output, once it has run.
    """

    module: nn.Module
    hidden: Tensor
    calls: Calls
    skips: Mapping[str, str] = field(default_factory=dict)
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Doubt:
    """Check of a rare failure, on a device: read once per block, to avoid waiting for the device.

    Args:
        values: values on the device; a non-finite one means failure.
        group: name of the shared input.
        again: True to redo the block with more damping of this input; False for an error.
    """

    values: Tensor
    group: str
    again: bool


@dataclass
class Stats:
    """A block with its calibration inputs.

    Args:
        module: the block.
        groups: its shared inputs, in order.
        calls: calls of the model.
        stage: number of the call.
        hidden: input of the block, [samples, tokens, width].
        outputs: its output after a staged run; passes that change weights later reset it.
        original: the block in the original stream, if a pass needs it.
        scales: its fixed scales.
        raised: name of a shared input -> times that its damping was raised, when the block is redone.
        gradients: linear -> gradients of its output [tokens, N], if a pass needs them (`gradients.py`).
        doubts: checks to read when the block is done; empty on a CPU.
        share: this rank's share of the sequences, which `hidden` holds; None for all of them, in one process.
        ranks: ranks that share the work on this block; None for one process.
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
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    share: Share | None = None
    ranks: Ranks | None = None
    _unchecked: dict[str, Tensor] = field(default_factory=dict)

    def failed(self) -> list[Doubt]:
        """Return the failed checks, with one read from the device if there are any checks."""
        for name, values in self.scales.checked.items():
            self.doubt(values, name, again=False)
        self.scales.checked.clear()
        if self.ranks is not None and self.calls.device.type != "cpu":
            return self._failed_anywhere(self.ranks)
        if self.doubts and math.isfinite(torch.cat([doubt.values for doubt in self.doubts]).sum().item()):
            return []
        return [doubt for doubt in self.doubts if not bool(torch.isfinite(doubt.values).all())]

    def _failed_anywhere(self, ranks: Ranks) -> list[Doubt]:
        """Return the failed checks of all ranks: each has made its own, of what it solved."""
        failed = [doubt for doubt in self.doubts if not bool(torch.isfinite(doubt.values).all())]
        told = ranks.agree([(doubt.group, doubt.again) for doubt in failed])
        anywhere = dict.fromkeys(tuple(one) for some in told for one in some)
        return [Doubt(torch.empty(0), group, again) for group, again in anywhere]

    def doubt(self, values: Tensor, group: str, *, again: bool) -> None:
        """Add a check of values on a device; on a CPU it was made already."""
        if values.is_cuda:
            self.doubts.append(Doubt(values, group, again))

    def _visited(self, visit: Visit, group: SharedInput, sums: InputStats) -> None:
        if sum(value.nbytes for value in self.module.parameters()) > machine.KEPT:
            machine.trim_heap()  # matrices of this input do not fit into the holes of the one before
        doubts = len(self.doubts)
        visit(group, sums)
        if self.calls.device.type != "cpu":
            if group.name in self.raised:  # damping does not help against non-finite inputs
                self.doubt(sums.squares, group.name, again=False)
            elif len(self.doubts) == doubts:  # else the visit has added a check of its results
                self._unchecked[group.name] = sums.checked

    @torch.no_grad()
    def staged(
        self,
        visit: Visit | None,
        *,
        products: bool = True,
        noise: bool = False,
        moments: bool = True,
        drift: bool = False,
        quantized: bool = False,
        whole: bool = True,
    ) -> None:
        """Run the block on everything; at each shared input call `visit(group, statistics)` before its linears run.

        Args:
            visit: callback that may change the linears of the group; None to only run the block.
            products: True for statistics with a Hessian.
            noise: True to measure the noise of the Hessian.
            moments: True to measure means and ranges of inputs.
            drift: True to measure the drift of inputs and the lag of sums against the original stream.
            quantized: True for a pass that assigns codes: statistics are of inputs as the group's kernels see them,
                keys and values go through the cache's format, and missing fixed scales are found on the way.

        Raises:
            InputError: `activations-nonfinite`, with the linear.
        """
        self.outputs = None
        self.scales.use_cache(quantized)
        sums = partial(InputStats, products=products, noise=noise, moments=moments)
        at_once = self.calls.chunk if self.share is None else self.share.at_once
        together = self._pausing if self.share is None else self._in_step
        run = together if len(self.hidden) <= at_once else self._replaying
        run(visit, sums, drift, quantized, whole)
        if self._unchecked:  # checks of one run, in one launch; copied, since a view would keep a Hessian alive
            sizes = [len(values) for values in self._unchecked.values()]
            together = torch.cat(list(self._unchecked.values())).split(sizes)
            for name, values in zip(self._unchecked, together, strict=True):
                self.doubt(values, name, again=False)
            self._unchecked.clear()

    @torch.no_grad()
    def each(self, of: Callable[[InputStats], T], *, sequences: int | None = None, **measured: bool) -> dict[str, T]:
        """Return name of a shared input -> result of `of` on its statistics, `measured` as by `staged`.

        On a few threads of a CPU `of` runs on several inputs at a time: the forward does not need its results.
        """
        taken: dict[str, T] = {}
        stats = self
        if self.share is not None and sequences is not None and sequences < self.share.samples and self.few is not None:
            share, rows = self.share.first(sequences)
            calls = self.few(sequences) if rows else self.calls
            stats = replace(self, hidden=self.hidden[rows], calls=calls, share=share)
        elif self.share is None and sequences is not None and sequences < len(self.hidden):
            calls = self.calls if self.few is None else self.few(sequences)
            stats = replace(self, hidden=self.hidden[:sequences], calls=calls)
        waiting: dict[SharedInput, InputStats] = {}
        threads, alone = torch.get_num_threads(), self.ranks is not None or self.calls.device.type != "cpu"
        most = 1 if alone or not 1 < threads <= _FEW else 2 * threads

        def finish() -> None:
            # fewer inputs than threads: each takes all of them
            with one_thread(self.hidden) if len(waiting) >= threads > 1 else nullcontext(1) as at_once:
                results = spread(of, waiting.values(), at_once)
            taken.update(zip((group.name for group in waiting), results, strict=True))
            waiting.clear()

        def visit(group: SharedInput, seen: InputStats) -> None:
            if group.features > _LARGE:
                finish()
            waiting[group] = seen
            if group.features > _LARGE or len(waiting) == most:
                finish()

        stats.staged(visit, whole=False, **measured)
        finish()
        self.outputs = None
        return taken

    def over(self, work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int] | None = None) -> list[R]:
        """Return the result of each item; with ranks each is found by one of them, by `sizes`, and told to all.

        Args:
            work: function whose results are floats, tensors, quantized matrices, None, or tuples of these.
        """
        if self.ranks is None:
            return [work(item) for item in items]
        return self.ranks.over(work, items, sizes, self.calls.device)

    def by_rows(
        self, rows: Sequence[int], solve: Callable[[Piece], Sequence[tuple[QuantTensor, Tensor]]], *, apart: bool
    ) -> list[tuple[QuantTensor, Tensor]]:
        """Return codes and costs of weights with one input; with ranks each solves some of the rows.

        Args:
            rows: number of rows of each weight.
            solve: function that returns the codes of each part of a piece, and costs by row.
            apart: whether rows share nothing; if not, one rank solves all.
        """
        cut = pieces(rows, apart=apart and self.ranks is not None)
        sizes = [sum(len(range(rows[number])[some]) for number, some in piece) for piece in cut]
        solved: list[list[tuple[QuantTensor, Tensor]]] = [[] for _ in rows]
        for piece, parts in zip(cut, self.over(solve, cut, sizes), strict=True):
            for (number, _), part in zip(piece, parts, strict=True):
                solved[number].append(part)
        if len(cut) == 1:
            return [some[0] for some in solved]
        return [(joined([tensor for tensor, _ in some]), torch.cat([costs for _, costs in some])) for some in solved]

    def settled(self) -> Tensor:
        """Return the block's output with its present weights, [samples, tokens, width], inputs and cache quantized."""
        if self.scales.waits:
            self.staged(None, quantized=True)
        if self.scales.use_cache(True) or self.outputs is None or self.calls.live:
            # a live model's next block continues from this very run
            self.outputs = self.calls.run_all(self.module, self.stage, self.hidden)
        return self.outputs

    def original_outputs(self) -> Tensor:
        """Return the block's output in the unquantized model, [samples, tokens, width]."""
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
                inputs = args[0]
                if quantized:
                    self.scales.at_once(group, inputs)
                    inputs = self.scales.seen(group, inputs)
                if visit is not None:
                    sums = empty(name=group.name)
                    self._add(sums, group, self.hidden, {**seen, group.name: inputs}, before)
                    if group.name not in sources:  # free it early
                        before.pop(group.name, None)
                    self._visited(visit, group, sums)
                if not (waiting or whole):
                    raise _Reached

            return hook

        hooks = self._keeping(self.module, lambda: seen, sources)
        hooks += [_first(self.module, group, pause(group)) for group in self.groups]
        watching = self.scales.watching_cache(whole=True) if quantized else nullcontext()
        with hooked(hooks), watching, suppress(_Reached):
            self.outputs = self.calls.run(self.module, self.stage, self.hidden)

    def _originals(self) -> dict[str, Tensor]:
        """Return the shared inputs, and the tensors of sums, in the original stream, from one forward."""
        original, kept = self._original(), dict[str, Tensor]()
        hooks = self._keeping(original.module, lambda: kept, (*(group.name for group in self.groups), *self._sources()))
        with hooked(hooks):
            original.outputs = original.calls.run(original.module, self.stage, original.hidden)
        return kept

    def _replaying(
        self, visit: Visit | None, empty: Callable[..., InputStats], drift: bool, quantized: bool, whole: bool
    ) -> None:
        for group in self.groups if self.share is None else self._in_order():
            if quantized:
                self._find_scales(group)
            if visit is None:
                continue
            seen = self._seen(group, empty, partial(self._reached, group, drift, quantized))
            if seen.tokens:  # as when pausing: groups without tokens are not visited
                self._visited(visit, group, seen)
        if quantized and self.scales.cache_waits:  # no linear comes after the cache
            with self.scales.watching_cache(whole=False):
                self.calls.run_all(self.module, self.stage, self.hidden)
        if whole:
            self.outputs = self.calls.run_all(self.module, self.stage, self.hidden)

    def _seen(
        self,
        group: SharedInput,
        empty: Callable[..., InputStats],
        reached: Callable[[int, Tensor], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    ) -> InputStats:
        """Return the sums of a shared input over all chunks, and over those of the other ranks.

        Args:
            reached: function of a chunk's number and its part of `hidden`, which returns the tensors in both streams.
        """
        parts = self.hidden.split(self.calls.chunk)

        def added(sums: InputStats, chunks: Iterable[int]) -> InputStats:
            for number in chunks:
                part = parts[number].to(self.calls.device)
                here, before = reached(number, part)
                if group.name in here:
                    self._add(sums, group, part, here, before)
            return sums

        if self.share is None:
            return added(empty(name=group.name), range(len(parts)))
        shares = self.share.by_part(self.calls.chunk)
        lots = (added(empty(name=group.name, part=part), chunks) for part, chunks in shares)
        return self.share.summed(group.name, group.members, lots)

    def _reached(
        self, group: SharedInput, drift: bool, quantized: bool, number: int, part: Tensor
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Replay the block on a chunk up to a shared input, in both streams."""
        reached = self._reach(self.module, group, part, number, drift)
        if group.name not in reached or not drift:
            before: Mapping[str, Tensor] = {}
        else:
            original = self._original()
            whole = original.hidden[number * self.calls.chunk :][: self.calls.chunk].to(self.calls.device)
            before = self._reach(original.module, group, whole, number, drift, original.calls)
        if quantized and group.name in reached:
            reached[group.name] = self.scales.seen(group, reached[group.name])
        return reached, before

    def _in_step(
        self, visit: Visit | None, empty: Callable[..., InputStats], drift: bool, quantized: bool, whole: bool
    ) -> None:
        """Run all chunks side by side: each forward waits at a shared input until all have come, or gone past.

        Shared inputs come in one order on every rank, so that no rank waits for sums of an expert that no
        token reaches on another.
        """
        groups = self._in_order()
        parts = list(self.calls.chunks(self.hidden)) if len(self.hidden) else []
        sources = self._sources() if drift else ()
        before = self._originals_apart() if drift else [{} for _ in parts]
        kept: dict[Any, dict[str, Tensor]] = {}
        outputs: dict[int, Tensor] = {}
        standing: dict[int, tuple[int, Tensor]] = {}

        def pause(index: int, group: SharedInput) -> Hook:
            passed = set[Any]()

            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                here = greenlet.getcurrent()
                if here not in passed:
                    passed.add(here)
                    here.parent.switch((index, args[0]))

            return hook

        def go_on(number: int, *args: Any) -> None:
            left = forwards[number].switch(*args)
            if forwards[number].dead:
                outputs[number] = left
            else:
                standing[number] = left

        forwards = [greenlet(partial(self.calls.run, self.module, self.stage)) for _ in parts]
        kept.update({forward: {} for forward in forwards})
        hooks = self._keeping(self.module, lambda: kept[greenlet.getcurrent()], sources)
        hooks += [_first(self.module, group, pause(index, group)) for index, group in enumerate(groups)]
        with hooked(hooks):
            for number, part in enumerate(parts):
                go_on(number, part, number)
            for index, group in enumerate(groups):
                come = {number: inputs for number, (at, inputs) in standing.items() if at == index}
                if any(at < index for at, _ in standing.values()):
                    value = f"{group.name} runs before another linear for some texts, after it for others"
                    rule, where = "ranks need one order of linears for all texts", type(self.module).__name__
                    raise InputError("stream-unsupported", where, value, rule, "compile on one rank")

                def reached(
                    number: int, _: Tensor, group: SharedInput = group, come: Mapping[int, Tensor] = come
                ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
                    if number not in come:
                        return {}, {}
                    inputs = self.scales.seen(group, come[number]) if quantized else come[number]
                    return {**kept[forwards[number]], group.name: inputs}, before[number]

                if visit is not None:
                    seen = self._seen(group, empty, reached)
                    if group.name not in sources:  # free it early
                        for one in before:
                            one.pop(group.name, None)
                    if seen.tokens:
                        self._visited(visit, group, seen)
                    del seen
                for number in come:
                    del standing[number]
                    if whole or index + 1 < len(groups):
                        go_on(number)
                    else:
                        forwards[number].throw()
                del come
        if whole:
            self.outputs = gathered(
                (outputs.pop(number) for number in range(len(parts))), len(self.hidden), self.hidden.device
            )

    def _in_order(self) -> list[SharedInput]:
        """List the shared inputs in the order in which they run: that of the trace, but forced experts come first."""
        groups = list(self.groups)
        for path, layer in found_in(self.module).items():
            places = [place for place, group in enumerate(groups) if group.name.startswith(f"{path}.")]
            forced = {f"{path}.{number}" for number in layer.forced if layer.routed}
            last = [groups[place].name.rpartition(".")[0] not in forced for place in places]
            own = [groups[place] for _, place in sorted(zip(last, places, strict=True))]
            for place, group in zip(places, own, strict=True):
                groups[place] = group
        return groups

    def _originals_apart(self) -> list[dict[str, Tensor]]:
        """Return the result of `_originals` for each chunk."""
        original, inputs, outputs = self._original(), list[dict[str, Tensor]](), list[Tensor]()
        names = (*(group.name for group in self.groups), *self._sources())
        for number, part in enumerate(original.calls.chunks(original.hidden)):
            inputs.append({})
            with hooked(self._keeping(original.module, lambda: inputs[-1], names)):
                outputs.append(original.calls.run(original.module, self.stage, part, number))
        original.outputs = gathered(outputs, len(original.hidden), original.hidden.device)
        return inputs

    def _find_scales(self, group: SharedInput) -> None:
        """Find missing fixed scales up to a group by replays: of the cache, then of the group's inputs."""
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
        """Return a shared input, and the inputs of earlier modules, from a run of one chunk up to there."""
        reached: dict[str, Tensor] = {}

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            reached[group.name] = args[0]
            raise _Reached

        hooks = self._keeping(module, lambda: reached, self._sources() if drift else ())
        hooks.append(_first(module, group, stop))
        with hooked(hooks), suppress(_Reached):
            (calls or self.calls).run(module, self.stage, part, number)
        return reached

    def _add(
        self,
        sums: InputStats,
        group: SharedInput,
        part: Tensor,
        here: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
    ) -> None:
        """Add a shared input in both streams; `part` is the block's input."""

        # an expert has different tokens in each stream, so only tensors with all tokens are compared
        def whole(name: str) -> bool:
            both = name in here and name in before and here[name].shape == before[name].shape
            return both and here[name].numel() // here[name].shape[-1] == part.numel() // part.shape[-1]

        original = self.scales.moved(group, before[group.name]) if whole(group.name) else None
        sources = {} if original is None or self.original is None else self.original.skips
        added = {linear: sources[linear] for linear in group.members if linear in sources and whole(sources[linear])}
        lags = {linear: before[name] - here[name] for linear, name in added.items()}
        stream = here[next(iter(added.values()))] if added else None
        if original is not None and len(added) == len(group.members):  # [N, K] instead of [K, K]
            moved, original = original.float() - here[group.name].float().view(original.shape), None
            for linear, lag in lags.items():
                weight = weight_of(self.module.get_submodule(linear)).float()
                lags[linear] = lag + (moved @ weight.T).view(lag.shape)
        sums.add(here[group.name], original, lags, stream)

    def _sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._original().skips.values()))

    def _keeping(
        self, module: nn.Module, kept: Callable[[], dict[str, Tensor]], names: Iterable[str]
    ) -> list[RemovableHandle]:
        """Add hooks for keeping the first inputs of modules in what `kept` returns as they run."""

        def keep(name: str) -> Hook:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                kept().setdefault(name, args[0])

            return hook

        # before hooks that quantize an input or move its channels: the residual stream is not quantized
        inner = ((name, module.get_submodule(name)) for name in dict.fromkeys(names))
        return [one.register_forward_pre_hook(keep(name), prepend=True) for name, one in inner]

    def _original(self) -> Original:
        assert self.original is not None, "a pass that uses the original stream must list it in `needs`"
        return self.original
