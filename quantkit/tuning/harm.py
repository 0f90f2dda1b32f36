"""Measure the harm of each unit: the KL divergence, in nats a token, with that unit alone quantized.

With o, c the logits [V] of the original and of the variant at one position, p = softmax(o) and d = c − o:

    KL(p ‖ softmax(c)) = log(1 + Σ p (exp d − 1)) − Σ p d

This form loses no digits where d is small, as it is when one unit of hundreds changes. A unit is the linears of a block
that share an input: a runtime may fuse them, so they have one scheme. The recipe's own passes quantize it in the
candidate's scheme, from the float model's inputs, after all folds (folds change no output).

One candidate, the anchor, is measured this way for every unit. The other candidates change the block's output in a
similar direction, and KL is quadratic in a small change. So their KL is the anchor's, scaled by the squared change of
the block's output:  KL(c) = KL(anchor) · ‖y_c − y‖² / ‖y_anchor − y‖².  Without an anchor every candidate is measured;
that takes as many times as long as there are candidates.

Streaming: a variant is the hidden states after its quantized block. Blocks are the outer loop, and all variants of the
*wave* pass through each block, so a wave loads each block once. A wave covers as many blocks as have variants that fit
into `STATES` bytes. The unchanged model runs beside them and gives the reference logits. Memory holds one block, the
states of a wave, and the head. The harms of a wave are yielded when it ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.statistics.collected import Stats
from quantkit.formats import load_format
from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.calls import Calls, unsupported
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.block import Block
from quantkit.model.structure.traced import set_weight, weight_of
from quantkit.passes import Outcome, Pass
from quantkit.pipeline.blocks.work import PassRun, Worked, looks_at_original, work
from quantkit.planning.compiling import chunk_size
from quantkit.recipe import assigners
from quantkit.scheme import WeightScheme

# bytes for the hidden states of a wave, and the least number of waves (harms are cached after each)
STATES = 512 * 2**20
WAVES = 4
# number of logits in memory at one time
_LOGITS = 1 << 23
# an anchor with less than this share of another candidate's error cannot predict it: it may be lossless
_FAINT = 1e-4

Schemes = Mapping[str, WeightScheme]


@dataclass(frozen=True)
class UnitHarm:
    """The harm of one unit in one candidate.

    Args:
        block: index of the unit's block.
        members: full names of the unit's linears.
        candidate: name of the candidate.
        kl: KL in nats a token.
        error: squared change of the block's output, relative to its squared norm.
        scaled: True if `kl` is scaled from the anchor's, False if it was measured.
    """

    block: int
    members: tuple[str, ...]
    candidate: str
    kl: float
    error: float
    scaled: bool = False


@dataclass(frozen=True)
class HarmSubject:
    """The model, the candidates and the texts of a measurement of harms.

    Args:
        stream: the float model.
        steps: the recipe's passes.
        candidates: scheme of each linear, by candidate and full name; linears without one are not changed.
        calibration: token ids [samples, tokens] for passes that need calibration; None if none does.
        ids: token ids [samples, tokens] on which the harm is measured.
        probe_ids: a few token ids for tracing blocks.
        widest: largest number of features of any activation.
        dtype: dtype of the tensors in high precision.
        seed: seed of the passes.
        anchor: name of the candidate that is measured at the output; None measures all.
    """

    stream: StreamedModel
    steps: Sequence[PassRun]
    candidates: Mapping[str, Schemes]
    calibration: Tensor | None
    ids: Tensor
    probe_ids: Tensor
    widest: int
    dtype: torch.dtype
    seed: int = 0
    anchor: str | None = None


def measure(
    subject: HarmSubject, start: int = 0, tell: Callable[[float], None] | None = None
) -> Iterator[list[UnitHarm]]:
    """Measure the harms of all units from block `start` on, and yield them wave by wave in the order of the blocks.

    `tell` is called with the share that is done, from 0 to 1.
    """
    return _Measurement(subject, start, tell or (lambda done: None)).waves()


class _Measurement:
    """The unchanged model's hidden states at the current block, for both texts."""

    def __init__(self, subject: HarmSubject, start: int, tell: Callable[[float], None]) -> None:
        self.subject = subject
        self.start = start
        self.tell = tell
        self.view = _OneBegin(subject.stream)
        self.calls = self.view.begin(subject.ids, subject.ids.shape[0])
        if self.calls.live or len(self.view.visits) > len(self.view.block_names):
            raise unsupported(subject.stream.source.architecture, "has blocks that depend on each other")
        self.clean = self.calls.hidden
        self.calibration: Tensor | None = None
        self.calibrated: Calls | None = None
        if subject.calibration is not None:
            self.calibrated = self.view.begin(
                subject.calibration, chunk_size(subject.widest, subject.calibration.shape[1])
            )
            self.calibration = self.calibrated.hidden
        self.count = len(subject.stream.block_names)

    def waves(self) -> Iterator[list[UnitHarm]]:
        for index in range(self.start):
            self._advance(self.subject.stream.load(index), index)
        first = self.start
        while first < self.count:
            harms, first = self._wave(first)
            yield harms

    @torch.no_grad()
    def _advance(self, module: nn.Module, index: int) -> None:
        """Run both texts through a block of the unchanged model."""
        self.clean = self.calls.run_all(module, index, self.clean)
        if self.calibrated is not None and self.calibration is not None:
            self.calibration = self.calibrated.run_all(module, index, self.calibration)

    @torch.no_grad()
    def _wave(self, first: int) -> tuple[list[UnitHarm], int]:
        """Measure one wave; return the harms of its blocks, and the first block of the next wave."""
        most = max(1, -(-self.count // WAVES))
        fits = STATES // (self.clean.numel() * self.clean.element_size())
        variants: list[_Variant] = []
        last, a_block = first, 0
        while last < self.count and last - first < most and len(_carried(variants)) + a_block <= max(fits, a_block):
            module = self.subject.stream.load(last)
            self._carry(module, last, variants)
            clean, calibration = self.clean, self.calibration
            self._advance(module, last)
            fresh = self._variants(last, clean, calibration)
            a_block = len(_carried(fresh))
            variants += fresh
            last += 1
            self.tell(self._share(first, last, last))
        reference = self.clean
        for index in range(last, self.count):
            module = self.subject.stream.load(index)
            reference = self.calls.run_all(module, index, reference)
            self._carry(module, index, variants)
            self.tell(self._share(first, last, index))
        model = self.subject.stream.rest()
        head = Head(model, self.subject.stream.paths, self.subject.stream.flow)
        carried = _carried(variants)
        scored = divergences(
            head, self.subject.ids, reference, [variant.state for variant in carried if variant.state is not None]
        )
        for variant, kl in zip(carried, scored, strict=True):
            variant.kl = kl
        self.tell(self._share(first, last, self.count))
        return _harms(variants), last

    def _carry(self, module: nn.Module, index: int, variants: Sequence[_Variant]) -> None:
        for variant in _carried(variants):
            assert variant.state is not None
            variant.state = self.calls.run_all(module, index, variant.state)

    def _share(self, first: int, last: int, index: int) -> float:
        """Return the share done so far, counted in blocks run: the variants of block i run through n − i blocks."""
        count = self.count
        whole = (count - self.start) * (count - self.start + 1) / 2
        before = sum(count - block for block in range(self.start, first))
        mine = sum(count - block for block in range(first, last))
        passed = sum(min(index, count) - block for block in range(first, last))
        # scoring with the head takes about as long as a few blocks: the last tenth of a wave
        return (before + (mine if index >= count else 0.9 * min(passed, mine))) / whole

    def _variants(self, index: int, clean: Tensor, calibration: Tensor | None) -> list[_Variant]:
        """Make a block's variants from its inputs; variants that an anchor predicts keep no states."""
        subject = self.subject
        before = _Before()
        at = next(i for i, step in enumerate(subject.steps) if step.run.name in assigners())
        steps = [*subject.steps[:at], PassRun(before, None), *subject.steps[at:]]
        size = float(self.clean.double().square().sum()) or 1.0
        units: dict[tuple[str, ...], list[_Variant]] = {}
        for name, schemes in subject.candidates.items():
            blocks = work(
                self.view,
                steps,
                schemes,
                subject.calibration,
                probe_ids=subject.probe_ids,
                widest=subject.widest,
                dtype=subject.dtype,
                seed=subject.seed,
                start=index,
                hidden=calibration,
                original=calibration if looks_at_original(subject.steps) else None,
            )
            worked = next(blocks)
            assert before.module is not None
            for members, values in _units(worked):
                with _replaced(before.module, values):
                    state = self.calls.run_all(before.module, index, clean)
                error = float((state - self.clean).double().square().sum()) / size
                units.setdefault(members, []).append(_Variant(index, members, name, error, state))
        for variants in units.values():
            anchor = next((one for one in variants if one.candidate == subject.anchor), None)
            if anchor is not None and anchor.error > _FAINT * max(one.error for one in variants):
                for one in variants:
                    one.state = one.state if one is anchor else None
        return [one for variants in units.values() for one in variants]


@dataclass
class _Variant:
    """A unit in a candidate: the error after its block, and its hidden states if it is measured at the output."""

    block: int
    members: tuple[str, ...]
    candidate: str
    error: float
    state: Tensor | None
    kl: float | None = None


def _carried(variants: Sequence[_Variant]) -> list[_Variant]:
    return [variant for variant in variants if variant.state is not None]


def _harms(variants: Sequence[_Variant]) -> list[UnitHarm]:
    """Return all harms: the measured ones, and those scaled from an anchor's."""
    anchors = {variant.members: variant for variant in variants if variant.kl is not None}
    harms = []
    for variant in variants:
        kl, scaled = variant.kl, variant.kl is None
        if kl is None:
            anchor = anchors[variant.members]
            assert anchor.kl is not None
            kl = anchor.kl * variant.error / anchor.error
        harms.append(UnitHarm(variant.block, variant.members, variant.candidate, kl, variant.error, scaled))
    return harms


def _units(worked: Worked) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield each unit's full names of linears, with the dequantized weights by name within the block."""
    block = worked.block
    for group in block.structure.groups:
        values = {}
        for linear in group.members:
            tensor = block.tensors.get(linear)
            if tensor is not None:
                columns = weight_of(block.module.get_submodule(linear)).shape[1]
                values[linear] = load_format(tensor.scheme.format).dequantize(tensor)[:, :columns]
        if values:
            yield tuple(block.full_name(linear) for linear in values), values


@contextmanager
def _replaced(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the weights of some linears of a module within a `with` block."""
    kept = {name: module.get_submodule(name).weight for name in values}
    for name, value in values.items():
        set_weight(module.get_submodule(name), value)
    try:
        yield
    finally:
        for name, weight in kept.items():
            module.get_submodule(name).weight = weight


class _Before(Pass):
    """A step just before quantization that copies the block there: folded, in full precision."""

    name = "tune-before"
    Settings: Any = None

    def __init__(self) -> None:
        self.module: nn.Module | None = None

    def run(self, block: Block, stats: Stats, settings: Any) -> Outcome:
        """Copy the block."""
        self.module = copy.deepcopy(block.module)
        return Outcome(False)


class _OneBegin:
    """A stream that records the first block's calls once per text, not for every quantized block."""

    def __init__(self, stream: StreamedModel) -> None:
        self.stream = stream
        self.block_names = stream.block_names
        self.visits = stream.visits
        self._begun: dict[tuple[int, int], tuple[Tensor, Calls]] = {}

    def load(self, index: int) -> nn.Module:
        return self.stream.load(index)

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        key = (id(ids), chunk)
        if key not in self._begun:
            self._begun[key] = (ids, self.stream.begin(ids, chunk))
        return self._begun[key][1]


@torch.no_grad()
def divergences(head: Head, ids: Tensor, reference: Tensor, states: Sequence[Tensor]) -> list[float]:
    """Return the mean KL, in nats a token, of each of `states` from `reference`.

    Each holds the last hidden states [samples, tokens, width]. Memory holds the logits of three models at a few
    positions.
    """
    samples, length = ids.shape
    sums = [0.0] * len(states)
    vocabulary = int(head.model.get_output_embeddings().weight.shape[0])  # type: ignore[operator, union-attr, arg-type]
    few = max(1, _LOGITS // vocabulary)
    few = -(-length // -(-length // few))  # parts of about one size
    for sample in range(samples):
        for start in range(0, length, few):
            part = (slice(sample, sample + 1), slice(start, start + few))
            original = head(reference[part], ids[part])[0].float()
            weights = original.softmax(dim=-1)
            for i, state in enumerate(states):
                sums[i] += float(kl(weights, original, head(state[part], ids[part])[0].float()).sum())
    return [total / (samples * length) for total in sums]


def kl(weights: Tensor, original: Tensor, changed: Tensor) -> Tensor:
    """Return the KL [P] of each position by the module's formula, from softmax(original) and both logits [P, V].

    A common shift of all logits does not change the KL; it is subtracted first, which keeps the rounding error small.
    """
    moved = changed - original
    moved -= (weights * moved).sum(dim=-1, keepdim=True)
    mean = (weights * moved).sum(dim=-1)
    grown = (weights * moved.expm1_()).sum(dim=-1)
    return (grown.log1p_() - mean).clamp_(min=0.0)
