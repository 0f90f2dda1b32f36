"""The loop over blocks: load, trace, run every pass, hand the outputs to the next block.

Block outer, pass inner: a block is finished before the next is loaded, and the next receives the outputs of the
quantized ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit import machine
from quantkit.bundle import Decision
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.statistics import routed
from quantkit.calibrate.statistics.collected import Original, Stats
from quantkit.calibrate.statistics.parts import Share
from quantkit.calibrate.statistics.scales import Scales
from quantkit.calibrate.statistics.sums import nonfinite
from quantkit.errors import InputError
from quantkit.model.streaming.calls import Call, Calls, shape_of
from quantkit.model.streaming.stream import BlockStream
from quantkit.model.streaming.transforms import attach_cache, attach_inputs
from quantkit.model.structure import experts, fold
from quantkit.model.structure import traced as structure
from quantkit.model.structure.block import Block
from quantkit.model.structure.fold import Fold
from quantkit.model.structure.residual import skips
from quantkit.model.structure.traced import Computed, Structure
from quantkit.passes import NOTE, Outcome, Pass, decision
from quantkit.passes.solvers.factor import ATTEMPTS, no_factor
from quantkit.planning.compiling import chunk_size
from quantkit.plugins.outside import demand_returned
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# blocks after which freed memory is given back; every time would cost a second a gigabyte
_TRIM = 4
# what a fixed scale that is shorter than min-max asks for
SATURATED = "saturated"

V = TypeVar("V")


@dataclass(frozen=True)
class PassRun:
    """A pass with its settings."""

    run: Pass
    settings: Any

    @property
    def needs(self) -> frozenset[str]:
        """Statistics for the pass with these settings."""
        return self.run.needs_with(self.settings)


@dataclass
class Worked:
    """One finished block, with its codes and its changed module.

    Attributes:
        hidden: its output on the calibration set; None if no pass looks at data.
        original: its output in the original stream; None if no pass looks at that.
        calls, originals: remaining calls of either stream.
        errors: linear's full name -> relative squared weight error, [] on the block's device.
        routed: full name of an expert's linear -> number of calibration tokens routed to it.
    """

    block: Block
    hidden: Tensor | None = None
    original: Tensor | None = None
    calls: Calls | None = None
    originals: Calls | None = None
    decisions: list[Decision] = field(default_factory=list)
    errors: dict[str, Tensor] = field(default_factory=dict)
    routed: dict[str, int] = field(default_factory=dict)


# shared input's name -> where its scale can go, and why some have no such place
Places = tuple[Mapping[str, Fold], Mapping[str, str]]


@dataclass(frozen=True)
class Known:
    """Facts of a block that hold for the blocks like it.

    Attributes:
        folds: folds; each further block proves them again, unless it computes the same as `computed`.
        skips: linear -> tensor that its output is added to (`model/structure/residual.py`). Values are compared to find
            it. On a GPU that would wait for the device, so blocks of one structure share the result.
        structure: structure of the block that gave `skips`.
        computed: operations of the block that proved `folds`, regardless of weights; recorded on a GPU only, where a
            proof takes hundreds of launches and a wait.
    """

    folds: Places = field(default_factory=lambda: ({}, {}))
    skips: Mapping[str, str] = field(default_factory=dict)
    structure: Structure | None = None
    computed: Sequence[Any] = ()


class _Lazy(Mapping[str, V], Generic[V]):
    """A mapping that is made at the first look."""

    def __init__(self, make: Callable[[], Mapping[str, V]]) -> None:
        self._make = make

    def __getitem__(self, name: str) -> V:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


class _Folds:
    """Folds of a block, searched and proved on demand: most recipes need none.

    Blocks are alike, so the folds of the last block are first proved here all at once; only a failure starts a search.
    """

    def __init__(
        self,
        module: nn.Module,
        traced: Structure,
        call: Call,
        known: Known,
        computed: Sequence[Any],
        quantized: set[str],
    ) -> None:
        self._module, self._structure, self._call, self._known = module, traced, call, known
        self._computed = computed
        self._wanted = [group.name for group in traced.groups if not quantized.isdisjoint(group.members)]
        self._asked = False

    @cached_property
    def places(self) -> Places:
        """Folds, and reasons where there are none."""
        self._asked = True
        folds, reasons = self._known.folds
        alike = bool(folds) and {*folds, *reasons} == {group.name for group in self._structure.groups}
        alike = alike and not any(reasons.get(name) == fold.UNASKED for name in self._wanted)
        if alike and self._computed and self._computed == self._known.computed:
            return self._known.folds
        with experts.all_running(self._module):
            places = self._known.folds
            if not (alike and self._proved(folds)):
                machine.trim_heap()  # copies in float64 fit into no hole, nor what follows into theirs
                places = fold.find(self._module, self._structure, self._call, self._wanted)
            if self._computed and not self._proved(places[0], whatever_weights=True):
                self._computed = ()  # the next block is proved by itself
            machine.trim_heap()
            return places

    def known(self, before: Known) -> Known:
        """Return known folds for the next block; this block is no model for it if fewer of its folds hold."""
        if not self._asked or len(self.places[0]) < len(before.folds[0]):
            return before
        return replace(before, folds=self.places, computed=self._computed)

    def _proved(self, folds: Mapping[str, Fold], **how: bool) -> bool:
        return fold.prove_all(self._module, self._structure, folds, self._call, **how) <= fold.TOLERANCE


def looks_at_data(
    steps: Sequence[PassRun], activations: Iterable[ActivationScheme] = (), cache: CacheScheme | None = None
) -> bool:
    """Tell whether any pass, or a fixed scale of inputs or of the KV cache, needs the calibration set."""
    fixed = any(not scheme.dynamic for scheme in activations) or (cache is not None and not cache.dynamic)
    return fixed or any(step.needs for step in steps)


def looks_at_original(steps: Sequence[PassRun]) -> bool:
    """Tell whether any pass needs the inputs of a block in the unquantized model."""
    return any(step.needs & {"original_inputs", "original_outputs"} for step in steps)


def check_order(steps: Sequence[PassRun]) -> None:
    """Refuse passes before their requirements. Raises InputError `pass-order`."""
    facts = {"unassigned"}
    before = last = ""
    for step in steps:
        value = place = ""
        rule = "a pass comes after what it requires, and before codes are assigned if it changes weights"
        if step.run.scope == "model" and before:
            value, place = f"comes after {before}", "the beginning"
            rule = "a pass of scope `model` comes before the passes of scope `block`"
        elif last:
            value, place = f"comes after {last}", f"a place before {last}"
            rule = "a pass of scope `answers` is the last one"
        elif missing := step.run.requires - facts:
            value, place = f"needs {', '.join(sorted(missing))}", "another place"
        if value:
            where, remedy = f"passes: {step.run.name}", f"move {step.run.name} to {place}"
            raise InputError("pass-order", where=where, value=value, rule=rule, remedy=remedy)
        before = step.run.name if step.run.scope == "block" else before
        last = step.run.name if step.run.scope == "answers" else last
        facts |= step.run.ensures
        if "codes" in step.run.ensures:
            facts.discard("unassigned")


@dataclass
class _Running:
    """A set of tokens on its way through the blocks; `hidden` is the input of the next one."""

    calls: Calls
    visits: Sequence[int]
    hidden: Tensor

    def go_on(self, module: nn.Module, stage: int, outputs: Tensor | None = None) -> Tensor:
        """Continue behind a block, with its outputs if they are known; it may be called several times."""
        if outputs is None:
            outputs = self.calls.run_all(module, stage, self.hidden)
        self.hidden = self.calls.pass_on(stage, outputs)
        while stage + 1 < len(self.visits) and self.visits[stage + 1] == self.visits[stage]:
            stage += 1
            self.hidden = self.calls.pass_on(stage, self.calls.run_all(module, stage, self.hidden))
        return self.hidden


@dataclass(frozen=True)
class Rare:
    """Experts that receive fewer calibration tokens than a limit, and their treatment; see `CalibrationChoice`."""

    tokens: int = 64
    action: Literal["force", "keep"] = "force"


def work(
    stream: BlockStream,
    steps: Sequence[PassRun],
    schemes: Mapping[str, WeightScheme],
    ids: Tensor | None,
    *,
    probe_ids: Tensor,
    widest: int,
    dtype: torch.dtype,
    seed: int = 0,
    fuses: bool = False,
    tensors: bool = False,
    activations: Mapping[str, ActivationScheme] | None = None,
    cache: CacheScheme | None = None,
    chunk: int | None = None,
    start: int = 0,
    hidden: Tensor | None = None,
    original: Tensor | None = None,
    begun: int | None = None,
    rare: Rare | None = None,
    finished: Callable[[int], nn.Module] | None = None,
    known: Known | None = None,
    gradients: Callable[[int], Mapping[str, Tensor]] | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Worked]:
    """Run every pass on every block, one block at a time.

    Args:
        schemes: linear's full name -> how to store it; those not named stay in high precision.
        ids: [samples, tokens] to calibrate on, of all ranks; None when no pass looks at data.
        probe_ids: a few tokens to trace blocks and prove folds with.
        widest: the largest number of features of any activation.
        dtype: what unquantized tensors will be stored in.
        fuses: whether any destination gains from linears that are stored as one.
        tensors: whether any destination is a checkpoint for plain transformers.
        activations: linear's full name -> how its input is quantized, for those where it is.
        chunk: sequences of one forward; None: as many as a processor's memory should hold.
        start: the first block to work on; earlier ones are done.
        hidden: the input of block `begun` on `ids`, when resuming.
        original: the same in the original stream, where a pass looks at that.
        begun: at most `start`, which it is if nothing is said; blocks between the two run as they were decided on.
        finished: the blocks before `start` as they were decided on; a live model's forward goes through all of them.
        gradients: function of a block's number that gives the gradients of its linears' outputs, if a pass needs them.
        ranks: ranks that share the work; `hidden`, `original`, and those of what is yielded, are then of this rank's
            sequences alone (`parts.Share.rows`).

    Yields:
        each block when it is finished; the caller commits it before asking for the next.
    """
    visits = stream.visits
    calls = stream.begin(probe_ids, probe_ids.shape[0])
    probe = _Running(calls, visits, calls.hidden)
    seen: _Running | None = None
    before: _Running | None = None
    begun = start if begun is None else begun
    share = None
    if ids is not None and ranks is not None:
        fitting = chunk or chunk_size(widest, ids.shape[1])
        share = Share(ranks, len(ids), fitting, probe.calls.device)
        ids, chunk = ids[share.rows], share.chunk
    if ids is not None and looks_at_data(steps, (activations or {}).values(), cache):
        # what the shared inputs hold in the original stream is kept beside, about a third as much again: less than what
        # running every stage anew would cost
        calls = stream.begin(ids, chunk or chunk_size(widest, ids.shape[1]))
        seen = _Running(calls, visits, calls.hidden if hidden is None or calls.live else hidden)
        if looks_at_original(steps):
            others = stream.begin(ids, calls.chunk) if calls.live else calls
            before = _Running(others, visits, calls.hidden if original is None or calls.live else original)
    del hidden, original, calls
    block_steps = [step for step in steps if step.run.scope == "block"]
    more = (schemes, activations or {}, cache, dtype, seed, fuses, tensors, rare or Rare())
    few: Callable[[int], Calls] | None = None
    if ids is not None and seen is not None and not seen.calls.live:
        chunk = seen.calls.chunk
        few = functools.cache(lambda sequences: stream.begin(ids[:sequences], min(chunk, sequences)))
        if share is not None:
            few = functools.cache(functools.partial(_first_of, stream, ids, share))
    loop = _Loop(stream, block_steps, probe, seen, before, *more, known or Known(), few, gradients, share, ranks)
    for stage, index in enumerate(visits):
        if index in visits[:stage]:
            continue
        if index < start:
            if finished is not None and seen is not None and (seen.calls.live or index >= begun):
                seen.go_on(finished(index), stage)
                if before is not None:
                    before.go_on(stream.load(index), stage)
            if probe.calls.live:
                probe.go_on(stream.load(index), stage)
            continue
        worked, stats = loop.settled(index, stage)
        module = worked.block.module
        if seen is not None:
            worked.calls, worked.hidden = seen.calls, seen.go_on(module, stage, stats.settled())
            if before is not None:
                worked.originals = before.calls
            if stats.original is not None and before is not None:
                worked.original = before.go_on(stats.original.module, stage, stats.original_outputs())
            worked.decisions += _about_scales(worked.block, stats.scales)
        if probe.calls.live:
            probe.go_on(module, stage)
        if seen is not None and not seen.calls.live:
            seen.calls.hidden = seen.hidden  # not the first block's input, which nobody asks for again
        del module, stats
        yield worked
        del worked
        if index % _TRIM == _TRIM - 1:
            machine.trim_heap()


def _first_of(stream: BlockStream, ids: Tensor, share: Share, sequences: int) -> Calls:
    """Begin on this rank's sequences among the first ones of the set."""
    first, rows = share.first(sequences)
    return stream.begin(ids[rows], first.chunk)


@dataclass
class _Loop:
    """Arguments common to all blocks; see `work`."""

    stream: BlockStream
    steps: Sequence[PassRun]
    probe: _Running
    seen: _Running | None
    before: _Running | None
    schemes: Mapping[str, WeightScheme]
    activations: Mapping[str, ActivationScheme]
    cache: CacheScheme | None
    dtype: torch.dtype
    seed: int
    fuses: bool
    tensors: bool
    rare: Rare
    known: Known
    few: Callable[[int], Calls] | None = None
    gradients: Callable[[int], Mapping[str, Tensor]] | None = None
    share: Share | None = None
    ranks: Ranks | None = None

    def settled(self, index: int, stage: int) -> tuple[Worked, Stats]:
        """Put a block through its passes; again, where the device says that a Hessian had no factor.

        Raises InputError: `activations-nonfinite`, `hessian-not-positive`, and those of the passes.
        """
        raised: dict[str, int] = {}
        while True:
            worked, stats, known = self._once(index, stage, raised)
            failed = stats.failed()
            if not failed:
                self.known = known
                return worked, stats
            for doubt in failed:
                if not doubt.again:
                    raise nonfinite(worked.block.full_name(doubt.group), "NaN or infinite inputs")
            for group in dict.fromkeys(doubt.group for doubt in failed):
                raised[group] = raised.get(group, 0) + 1
                if raised[group] >= ATTEMPTS:
                    raise no_factor(f"raised tenfold {ATTEMPTS - 1} times", worked.block.full_name(group))
            del worked, stats  # or the block would be there twice

    def _once(self, index: int, stage: int, raised: Mapping[str, int]) -> tuple[Worked, Stats, Known]:
        module, known = self.stream.load(index), self.known
        call = self.probe.calls.call(stage)
        with experts.all_running(module):
            traced, computed = _traced(module, call)
        run = self.seen or self.probe
        counts = routed.count(module, run.calls, stage, run.hidden) if self.seen is not None else {}
        if self.ranks is not None and counts:
            counts = dict(zip(counts, self.ranks.total(list(counts.values())), strict=True))
        name = self.stream.block_names[index]
        prefix = f"{name}." if name else ""
        quantized = {linear for linear in traced.linears if prefix + linear in self.schemes}
        folds = _Folds(module, traced, call, known, computed, quantized)
        coded = {
            linear: self.activations[prefix + linear]
            for linear in traced.linears
            if prefix + linear in self.activations
        }
        block = Block(
            name=name,
            index=index,
            module=module,
            structure=traced,
            folds=_Lazy(lambda: folds.places[0]),
            declined=_Lazy(lambda: folds.places[1]),
            schemes={linear: self.schemes.get(prefix + linear) for linear in (*traced.linears, *traced.idle)},
            dtype=self.dtype,
            seed=self.seed,
            fuses=self.fuses,
            # it shares what no pass has replaced: none writes into a parameter
            original=copy.deepcopy(module, {id(value): value for value in module.parameters()})
            if self.before is not None
            else None,
            inputs=attach_inputs(module, coded),
            cache=attach_cache(module, self.cache) if self.cache is not None else None,
            keeps_errors=any("weight_errors" in step.needs for step in self.steps),
        )
        worked = Worked(block)
        worked.routed, worked.decisions = settle(block, counts, self.rare)
        worked.decisions += _one_scale(block) if self.tensors else []
        stats = Stats(module, traced.groups, run.calls, stage, run.hidden, few=self.few, raised=raised)
        stats.scales, stats.share, stats.ranks = Scales(block.inputs, block.cache, self.dtype), self.share, self.ranks
        stats.gradients = {} if self.gradients is None else self.gradients(index)
        if block.original is not None and self.before is not None:
            if not (stats.calls.device.type != "cpu" and known.structure == traced):
                known = replace(known, skips=skips(module, call), structure=traced)
            stats.original = Original(block.original, self.before.hidden, self.before.calls, known.skips)
        idle = [linear for linear in traced.idle if block.schemes[linear] is not None]
        dead = [linear for linear in idle if experts.expert_of(linear, module)]
        why = "no token reached it while the block was traced"
        worked.decisions += [_never_ran(prefix + linear, why) for linear in idle if linear not in dead]
        for step in self.steps:
            outcome = demand_returned(step.run.run(block, stats, step.settings), Outcome, step.run, "run")
            worked.decisions += outcome.decisions
            worked.errors.update({prefix + linear: error for linear, error in outcome.errors.items()})
        if any("codes" in step.run.ensures for step in self.steps):
            idle = [linear for linear in block.linears() if linear not in block.tensors]
            unseen = [linear for linear in idle if experts.expert_of(linear, module)]
            why = "no calibration token reached it"
            worked.decisions += [_never_ran(prefix + linear, why) for linear in idle if linear not in unseen]
            worked.decisions += _rounded(block, [*dead, *unseen])
        routed.force(module, [])
        return worked, stats, folds.known(known)


def _one_scale(block: Block) -> list[Decision]:
    """Record inputs with one scale for all tokens in plain transformers."""
    odd = [name for group in block.structure.groups if group.dims != 3 for name in group.members]
    linears = [name for name in odd if name in block.inputs and block.inputs[name].scheme.granularity == "token"]
    if not linears:
        return []
    where = f"{block.full_name(linears[0])}{f' and {len(linears) - 1} more' if len(linears) > 1 else ''}"
    reason = (
        "its input is not [batch, tokens, K]: compressed-tensors gives tokens of a call one scale there, vLLM and the "
    )
    return [decision("calibrate", "one-scale", where, f"{reason}scores here one to each", "token", "call")]


def _never_ran(linear: str, why: str) -> Decision:
    return decision("trace", "never-ran", linear, f"{why}; it stays in high precision")


def _rounded(block: Block, linears: Iterable[str]) -> list[Decision]:
    """Round unreached experts to nearest: all experts of a layer are stored alike."""
    from quantkit.passes.assign import assign, nearest_alike

    owners: dict[tuple[str, int], list[str]] = {}
    for linear in linears:
        owners.setdefault((linear.rpartition(".")[0], block.weight(linear).shape[1]), []).append(linear)
    for names in owners.values():
        for linear, tensor in nearest_alike(block, names, "mse"):
            assign(block, linear, tensor)
    layers, taken = experts.found_in(block.module), list[Decision]()
    ran = {name.rpartition(".")[0] for name in block.structure.linears}
    for owner in dict.fromkeys(owner for owner, _ in owners):
        # while the block was traced, each token went to every expert that its layer can route to
        never = layers[owner.rpartition(".")[0]].routed and owner not in ran
        code, why = (NOTE, "no token can reach it") if never else ("expert-unrouted", "no calibration token reached it")
        taken.append(decision("calibrate", code, block.full_name(owner), f"{why}: it is rounded to nearest"))
    return taken


def _traced(module: nn.Module, call: Call) -> tuple[Structure, Sequence[Any]]:
    """Trace a block; on a GPU nothing is launched for it, unless a value decides what runs, and what it computes is
    known too."""
    if call.hidden.is_cuda:
        shapes = call.shapes()
        values = {name: shape_of(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
        seen = Computed(values, (shapes.hidden, *shapes.rest.leaves()))

        def run() -> None:
            with seen:
                seen.gives(shapes(lambda *args, **kw: functional_call(module, values, args, kw)))

        with suppress(RuntimeError):
            return structure.trace(module, run), seen.steps
    return structure.trace(module, lambda: call(module)), ()


def _about_scales(block: Block, scales: Scales) -> list[Decision]:
    """Record values beyond the fixed scales of a block, as one decision, and a cache that nothing was written to."""
    decisions = []
    scales.look()
    if scales.saturated:
        worst = max(scales.saturated, key=lambda scale: scale.beyond / scale.total)
        beyond, total = (sum(getattr(scale, name) for scale in scales.saturated) for name in ("beyond", "total"))
        reason = f"{beyond} of {total} calibration values lie beyond a fixed scale and saturate; most in {worst.name}"
        decisions.append(decision("calibrate", SATURATED, block.name, reason, None, beyond))
    if scales.cache_waits:
        reason = "its attention wrote nothing to the cache; its keys and values stay as they are"
        decisions.append(decision("calibrate", "cache-unused", block.name, reason))
    return decisions


_DONE = {
    "force": ("forced", "it is calibrated on all tokens that reach its layer"),
    "keep": ("kept", "it stays in high precision"),
    "few": ("fitted to few", "its layer routes by itself, so its codes are fitted to these alone"),
}


def settle(block: Block, counts: Mapping[str, int], rare: Rare) -> tuple[dict[str, int], list[Decision]]:
    """Force tokens to the experts that receive too few, or keep those experts in floats.

    Args:
        counts: expert -> calibration tokens that are routed to it.

    Returns:
        linear's full name -> the tokens its expert is routed, and the decisions.
    """
    owners = {linear: owner for linear in block.linears() if (owner := experts.expert_of(linear, block.module))}
    received = {block.full_name(linear): counts[owner] for linear, owner in owners.items() if owner in counts}
    chosen = [expert for expert, seen in counts.items() if seen < rare.tokens and expert in owners.values()]
    layers = experts.found_in(block.module)
    if rare.action == "force":
        for module in (block.module, block.original):
            if module is not None:
                routed.force(module, chosen)
    else:
        block.schemes = {linear: None if owners.get(linear) in chosen else how for linear, how in block.schemes.items()}
    decisions = []
    for expert in chosen:
        name, count = block.full_name(expert), counts[expert]
        forced = rare.action == "keep" or layers[expert.rpartition(".")[0]].routed
        done, reason = _DONE[rare.action if forced else "few"]
        why = f"{count} calibration tokens were routed to it, fewer than {rare.tokens}; {reason}"
        decisions.append(decision("calibrate", "expert-unrouted", name, why, count, done))
    return received, decisions
