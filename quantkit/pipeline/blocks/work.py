"""The loop over blocks: load, trace, run every pass, hand the outputs to the next block.

Block outer, pass inner: a block is finished before the next is loaded, and the next sees what the quantized
ones put out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit import machine
from quantkit.bundle import Decision
from quantkit.calibrate.statistics import collected
from quantkit.calibrate.statistics.collected import Original, Stats
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
from quantkit.passes import Outcome, Pass, decision
from quantkit.passes.solvers.factor import ATTEMPTS, no_factor
from quantkit.planning.compiling import chunk_size
from quantkit.plugins.outside import demand_returned
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# blocks after which freed memory is given back; every time would cost a second a gigabyte
_TRIM = 4
# what a fixed scale that is shorter than min-max asks for
SATURATED = "saturated"


@dataclass(frozen=True)
class PassRun:
    """A pass with its settings."""

    run: Pass
    settings: Any

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that the pass needs with these settings."""
        return self.run.needs_with(self.settings)


@dataclass
class Worked:
    """One finished block.

    Args:
        block: with its codes and its changed module.
        hidden: its output on the calibration set; None when no pass looks at data.
        original: its output in the original stream; None when no pass looks at that.
        calls, originals: how either goes on.
        decisions: of its passes.
        errors: linear's full name -> relative squared weight error, [] on the block's device.
        routed: of an expert's linear, its full name -> the calibration tokens that were routed to it.
    """

    block: Block
    hidden: Tensor | None
    original: Tensor | None = None
    calls: Calls | None = None
    originals: Calls | None = None
    decisions: list[Decision] = field(default_factory=list)
    errors: dict[str, Tensor] = field(default_factory=dict)
    routed: dict[str, int] = field(default_factory=dict)


# shared input's name -> where its scale can go, and why some have no such place
Found = tuple[Mapping[str, Fold], Mapping[str, str]]


@dataclass(frozen=True)
class Known:
    """What was found on a block, for those like it.

    Args:
        folds: see `Found`; proved on each block again, except on those that compute what `computed` says.
        skips: what each linear's output is added to (`model/structure/skip.py`). It is found by comparing values, which
            a GPU would be waited for, so that there the blocks of one structure share it.
        structure: of the block that `skips` was found on.
        computed: what the block computes that `folds` were proved on, for whatever weights (`structure/computed.py`);
            known on a GPU only, where a proof is hundreds of launches and a wait.
    """

    folds: Found = field(default_factory=lambda: ({}, {}))
    skips: Mapping[str, str] = field(default_factory=dict)
    structure: Structure | None = None
    computed: Sequence[Any] = ()


class _ProvedFolds(Mapping[str, Fold]):
    """The folds of a block, found and proved when first asked for: most recipes need none.

    Blocks are alike, so what held on the last one is proved here all at once; only if that fails are they searched for.

    Args:
        computed: what the block computes, if that is known.
    """

    def __init__(
        self, module: nn.Module, traced: Structure, call: Call, known: Known, computed: Sequence[Any] = ()
    ) -> None:
        self._module, self._structure, self._call, self._known = module, traced, call, known
        self._computed = computed
        self.asked = False

    @cached_property
    def found(self) -> Found:
        """Folds, and reasons where there are none."""
        self.asked = True
        folds, reasons = self._known.folds
        alike = bool(folds) and {*folds, *reasons} == {group.name for group in self._structure.groups}
        if alike and self._computed and self._computed == self._known.computed:
            return self._known.folds
        with experts.all_running(self._module):
            found = self._known.folds
            if not (alike and self._proved(folds)):
                found = fold.find(self._module, self._structure, self._call)
            if self._computed and not self._proved(found[0], whatever_weights=True):
                self._computed = ()  # the next block is proved by itself
            return found

    def known(self, before: Known) -> Known:
        """What is known for the next block, of which this one is no model if fewer of its folds hold."""
        if not self.asked or len(self.found[0]) < len(before.folds[0]):
            return before
        return replace(before, folds=self.found, computed=self._computed)

    def _proved(self, folds: Mapping[str, Fold], **how: bool) -> bool:
        return fold.prove_all(self._module, self._structure, folds, self._call, **how) <= fold.TOLERANCE

    def __getitem__(self, name: str) -> Fold:
        return self.found[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found[0])

    def __len__(self) -> int:
        return len(self.found[0])


class _Reasons(Mapping[str, str]):
    """Why there is no fold, as lazily."""

    def __init__(self, folds: _ProvedFolds) -> None:
        self._folds = folds

    def __getitem__(self, name: str) -> str:
        return self._folds.found[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._folds.found[1])

    def __len__(self) -> int:
        return len(self._folds.found[1])


def looks_at_data(
    steps: Sequence[PassRun], activations: Iterable[ActivationScheme] = (), cache: CacheScheme | None = None
) -> bool:
    """Whether any pass, or a fixed scale of inputs or of the KV cache, needs the calibration set."""
    fixed = any(not each.dynamic for each in activations) or (cache is not None and not cache.dynamic)
    return fixed or any(step.needs for step in steps)


def looks_at_original(steps: Sequence[PassRun]) -> bool:
    """Whether any pass needs what the unquantized model would feed a block."""
    return any(step.needs & {"original_inputs", "original_outputs"} for step in steps)


def check_order(steps: Sequence[PassRun]) -> None:
    """Refuse an order in which a pass lacks what it requires.

    Raises:
        InputError: `pass-order`.
    """
    facts = {"unassigned"}
    before = ""
    for step in steps:
        if step.run.scope == "model" and before:
            raise InputError(
                "pass-order",
                where=f"passes: {step.run.name}",
                value=f"comes after {before}",
                rule="what changes the whole model is done as its blocks load, before what works block by block",
                remedy=f"move {step.run.name} to the beginning",
            )
        before = step.run.name if step.run.scope == "block" else before
        missing = step.run.requires - facts
        if missing:
            raise InputError(
                "pass-order",
                where=f"passes: {step.run.name}",
                value=f"needs {', '.join(sorted(missing))}",
                rule="a pass comes after what it requires, and before codes are assigned if it changes weights",
                remedy=f"move {step.run.name} to another place",
            )
        facts |= step.run.ensures
        if "codes" in step.run.ensures:
            facts.discard("unassigned")


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
    activations: Mapping[str, ActivationScheme] | None = None,
    cache: CacheScheme | None = None,
    chunk: int | None = None,
    start: int = 0,
    hidden: Tensor | None = None,
    original: Tensor | None = None,
    begun: int | None = None,
    on_start: Callable[[Calls], None] | None = None,
    rare: Rare | None = None,
    finished: Callable[[int], nn.Module] | None = None,
    known: Known | None = None,
) -> Iterator[Worked]:
    """Run every pass on every block, one block at a time.

    Args:
        schemes: linear's full name -> how to store it; those not named stay in high precision.
        ids: [samples, tokens] to calibrate on; None when no pass looks at data.
        probe_ids: a few tokens to trace blocks and prove folds with.
        widest: the largest number of features of any activation.
        dtype: what unquantized tensors will be stored in.
        fuses: whether any destination gains from linears that are stored as one.
        activations: linear's full name -> how its input is quantized, for those where it is.
        chunk: sequences of one forward; None: as many as a processor's memory should hold.
        start: the first block to work on; earlier ones are done.
        hidden: the input of block `begun` on `ids`, when resuming.
        original: the same in the original stream, where a pass looks at that.
        begun: at most `start`, which it is if nothing is said; blocks between the two run as they were decided on.
        on_start: called with the calls before the first block.
        rare: what becomes of experts that see few calibration tokens.
        finished: the blocks before `start` as they were decided on; a live model's forward goes through all of them.
        known: what was found on a block like these.

    Yields:
        each block when it is finished; the caller commits it before asking for the next.
    """
    probe = stream.begin(probe_ids, probe_ids.shape[0])
    probed = probe.hidden
    calls: Calls | None = None
    originals: Calls | None = None
    activations = activations or {}
    begun = start if begun is None else begun
    if ids is not None and looks_at_data(steps, activations.values(), cache):
        both = looks_at_original(steps)
        # what the shared inputs hold in the original stream is kept beside, about a third as much again: less than what
        # running every stage anew would cost
        calls = stream.begin(ids, chunk or chunk_size(widest, ids.shape[1]))
        if both:
            originals = stream.begin(ids, calls.chunk) if calls.live else calls
            original = calls.hidden if original is None or calls.live else original
        hidden = calls.hidden if hidden is None or calls.live else hidden
        if on_start is not None:
            on_start(calls)
    known = known or Known()
    block_steps = [step for step in steps if step.run.scope == "block"]
    loop = _Loop(stream, block_steps, schemes, activations, cache, dtype, seed, fuses, rare or Rare())
    visits = stream.visits
    for stage, index in enumerate(visits):
        if index in visits[:stage]:
            continue
        if index < start:
            if finished is not None and calls is not None and hidden is not None and (calls.live or index >= begun):
                module = finished(index)
                hidden = _again(calls, module, stage, visits, calls.run_all(module, stage, hidden))
                if originals is not None and original is not None:
                    as_it_came = stream.load(index)
                    outputs = originals.run_all(as_it_came, stage, original)
                    original = _again(originals, as_it_came, stage, visits, outputs)
            if probe.live:
                module = stream.load(index)
                probed = _again(probe, module, stage, visits, probe.run_all(module, stage, probed))
            continue
        states = _States(stage, probe, probed, calls, hidden, originals, original)
        worked, stats, known = loop.settled(index, states, known)
        module = worked.block.module
        worked.calls, worked.originals = calls, originals
        if calls is not None:
            hidden = worked.hidden = _again(calls, module, stage, visits, stats.settled())
            if stats.original is not None and originals is not None:
                outputs = stats.original_outputs()
                original = worked.original = _again(originals, stats.original.module, stage, visits, outputs)
            worked.decisions += _about_scales(worked.block, stats.scales)
        if probe.live:
            probed = _again(probe, module, stage, visits, probe.run_all(module, stage, probed))
        if calls is not None and hidden is not None and not calls.live:
            calls.hidden = hidden  # not the first block's input, which nobody asks for again
        del module, stats, states
        yield worked
        del worked
        if index % _TRIM == _TRIM - 1:
            machine.trim_heap()


@dataclass(frozen=True)
class _States:
    """What a block is run on: the stage, and for probe, calibration set and original stream, calls and its input."""

    stage: int
    probe: Calls
    probed: Tensor
    calls: Calls | None
    hidden: Tensor | None
    originals: Calls | None
    original: Tensor | None


@dataclass(frozen=True)
class _Loop:
    """What all blocks have in common; see `work`."""

    stream: BlockStream
    steps: Sequence[PassRun]
    schemes: Mapping[str, WeightScheme]
    activations: Mapping[str, ActivationScheme]
    cache: CacheScheme | None
    dtype: torch.dtype
    seed: int
    fuses: bool
    rare: Rare

    def settled(self, index: int, states: _States, known: Known) -> tuple[Worked, Stats, Known]:
        """A block through its passes; again, where the device says that a Hessian had no factor.

        Raises:
            InputError: `activations-nonfinite`, `hessian-not-positive`, and those of the passes.
        """
        raised: dict[str, int] = {}
        while True:
            worked, stats, known = self._once(index, states, known, raised)
            failed = stats.failed()
            if not failed:
                return worked, stats, known
            for doubt in failed:
                if not doubt.again:
                    raise nonfinite(worked.block.full_name(doubt.group), "NaN or infinite inputs")
            for group in dict.fromkeys(doubt.group for doubt in failed):
                raised[group] = raised.get(group, 0) + 1
                if raised[group] >= ATTEMPTS:
                    raise no_factor(f"raised tenfold {ATTEMPTS - 1} times", worked.block.full_name(group))
            del worked, stats  # or the block would be there twice

    def _once(
        self, index: int, states: _States, known: Known, raised: Mapping[str, int]
    ) -> tuple[Worked, Stats, Known]:
        module = self.stream.load(index)
        stage, hidden = states.stage, states.hidden
        call = states.probe.call(stage)
        with experts.all_running(module):
            traced, computed = _traced(module, call)
        counts: dict[str, int] = {}
        if states.calls is not None and hidden is not None:
            counts = collected.count(module, states.calls, stage, hidden)
        folds = _ProvedFolds(module, traced, call, known, computed)
        name = self.stream.block_names[index]
        prefix = f"{name}." if name else ""
        block = Block(
            name=name,
            index=index,
            module=module,
            structure=traced,
            folds=folds,
            declined=_Reasons(folds),
            schemes={linear: self.schemes.get(prefix + linear) for linear in traced.linears},
            dtype=self.dtype,
            seed=self.seed,
            fuses=self.fuses,
            # it shares what no pass has replaced: none writes into a parameter
            original=copy.deepcopy(module, {id(each): each for each in module.parameters()})
            if states.original is not None
            else None,
            inputs=attach_inputs(
                module,
                {name: self.activations[prefix + name] for name in traced.linears if prefix + name in self.activations},
            ),
            cache=attach_cache(module, self.cache) if self.cache is not None else None,
            keeps_errors=any("weight_errors" in step.needs for step in self.steps),
        )
        worked = Worked(block, None)
        worked.routed, worked.decisions = settle(block, counts, self.rare)
        whole = hidden if hidden is not None else states.probed
        stats = Stats(module, traced.groups, states.calls or states.probe, stage, whole, raised=raised)
        stats.scales = Scales(block.inputs, block.cache, self.dtype)
        if block.original is not None and states.original is not None and states.originals is not None:
            if not (stats.calls.device.type != "cpu" and known.structure == traced):
                known = replace(known, skips=skips(module, call), structure=traced)
            stats.original = Original(block.original, states.original, states.originals, known.skips)
        for linear in traced.idle:
            if self.schemes.get(prefix + linear) is not None:
                reason = "no token reached it while the block was traced; it stays in high precision"
                worked.decisions.append(decision("trace", "never-ran", prefix + linear, reason))
        for step in self.steps:
            outcome = demand_returned(step.run.run(block, stats, step.settings), Outcome, step.run, "run")
            worked.decisions += outcome.decisions
            worked.errors.update({prefix + linear: error for linear, error in outcome.errors.items()})
        if any("codes" in step.run.ensures for step in self.steps):
            for linear in block.linears():
                if linear not in block.tensors:
                    reason = "no calibration token reached it; it stays in high precision"
                    worked.decisions.append(decision("trace", "never-ran", prefix + linear, reason))
        collected.force(module, [])
        return worked, stats, folds.known(known)


def _traced(module: nn.Module, call: Call) -> tuple[Structure, Sequence[Any]]:
    """The structure of a block; on a GPU nothing is launched for it, unless a value decides what runs, and what it
    computes is known too."""
    if call.hidden.is_cuda:
        shapes = call.shapes()
        values = {name: shape_of(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
        seen = Computed(values, (shapes.hidden, *shapes.given.leaves()))

        def run() -> None:
            with seen:
                seen.gives(shapes(lambda *args, **kw: functional_call(module, values, args, kw)))

        with suppress(RuntimeError):
            return structure.trace(module, run), seen.steps
    return structure.trace(module, lambda: call(module)), ()


def _again(calls: Calls, module: nn.Module, stage: int, visits: Sequence[int], hidden: Tensor) -> Tensor:
    """What the next block is given, of what this one has put out: it may be called again and again before."""
    hidden = calls.pass_on(stage, hidden)
    while stage + 1 < len(visits) and visits[stage + 1] == visits[stage]:
        stage += 1
        hidden = calls.pass_on(stage, calls.run_all(module, stage, hidden))
    return hidden


def _about_scales(block: Block, scales: Scales) -> list[Decision]:
    """What lies beyond the fixed scales of a block, as one decision, and a cache that nothing was written to."""
    found = []
    scales.look()
    if scales.saturated:
        worst = max(scales.saturated, key=lambda each: each.beyond / each.total)
        beyond, total = (sum(getattr(each, name) for each in scales.saturated) for name in ("beyond", "total"))
        reason = f"{beyond} of {total} calibration values lie beyond a fixed scale and saturate; most in {worst.name}"
        found.append(decision("calibrate", SATURATED, block.name, reason, None, beyond))
    if scales.cache_waits:
        reason = "its attention wrote nothing to the cache; its keys and values stay as they are"
        found.append(decision("calibrate", "cache-unused", block.name, reason))
    return found


_DONE = {
    "force": ("forced", "it is calibrated on all tokens that reach its layer"),
    "keep": ("kept", "it stays in high precision"),
}


@dataclass(frozen=True)
class Rare:
    """Experts that see fewer than so many calibration tokens, and what is done about them; see `CalibrationChoice`."""

    tokens: int = 64
    action: Literal["force", "keep"] = "force"


def settle(block: Block, counts: Mapping[str, int], rare: Rare) -> tuple[dict[str, int], list[Decision]]:
    """Force or keep the experts that see too little.

    Args:
        counts: expert -> calibration tokens that are routed to it.

    Returns:
        linear's full name -> the tokens its expert is routed, and the decisions.
    """
    owners = {linear: owner for linear in block.linears() if (owner := collected.expert_of(linear, block.module))}
    routed = {block.full_name(linear): counts[owner] for linear, owner in owners.items() if owner in counts}
    chosen = [expert for expert, seen in counts.items() if seen < rare.tokens and expert in owners.values()]
    done, reason = _DONE[rare.action]
    if rare.action == "force":
        for module in (block.module, block.original):
            if module is not None:
                collected.force(module, chosen)
    else:
        block.schemes = {linear: None if owners.get(linear) in chosen else how for linear, how in block.schemes.items()}
    found = []
    for expert in chosen:
        seen = f"{counts[expert]} calibration tokens were routed to it, fewer than {rare.tokens}"
        found.append(
            decision("calibrate", "expert-unrouted", block.full_name(expert), f"{seen}; {reason}", counts[expert], done)
        )
    return routed, found
