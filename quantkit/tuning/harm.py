"""What a unit's quantization does to the model's output, measured: KL in nats a token with that unit alone quantized.

With o, c the logits [V] of the original and of the variant at one position, p = softmax(o) and d = c − o:

    KL(p ‖ softmax(c)) = log(1 + Σ p (exp d − 1)) − Σ p d

which loses no digits where d is small, as it is when one unit of hundreds changes. A unit is the linears of a block
that share an input: what is fused in some runtime has one scheme. Its codes are those that the recipe's own passes
assign in the candidate's scheme, on the float model's inputs; folds that come before are made, since they change no
output.

One candidate, the anchor, is measured so for every unit. The others leave the same kind of error behind, larger or
smaller, and KL is quadratic in a small change; so theirs is the anchor's, scaled by the squared change of the block's
output:  KL(c) = KL(anchor) · ‖y_c − y‖² / ‖y_anchor − y‖².  Without an anchor all of them are measured, which takes as
many times as long.

Streaming: a variant is the hidden states behind the one block that differs. The blocks are the outer loop, and all
variants so far go through each, so a block is loaded once a *wave*: as many blocks' variants as fit into `STATES`
bytes. The unchanged model goes along as the first variant; at the end its logits are the original's. Memory is one
block, a wave's states, and the head. Every wave's harms are yielded when they are known.
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
from quantkit.model.streaming.calls import Calls, unsupported
from quantkit.model.streaming.stream import Head, StreamedModel
from quantkit.model.structure.block import Block
from quantkit.model.structure.traced import set_weight, weight_of
from quantkit.passes import Outcome, Pass
from quantkit.pipeline.blocks.work import PassRun, Worked, looks_at_original, work
from quantkit.planning.compiling import chunk_size
from quantkit.recipe import assigners
from quantkit.scheme import WeightScheme

# hidden states of a wave's variants; and waves at least, so that what was measured is kept every now and then
STATES = 512 * 2**20
WAVES = 4
# logits that are in memory at one time
_LOGITS = 1 << 23
# an anchor whose error is less than this share of another's says nothing about the other: it may be lossless
_FAINT = 1e-4

Schemes = Mapping[str, WeightScheme]


@dataclass(frozen=True)
class UnitHarm:
    """One unit, the linears `members` of a block, in one candidate.

    Args:
        kl: nats a token.
        error: the squared change of the block's output, as a share of its square.
        scaled: whether the KL follows from another candidate's, see the module.
    """

    block: int
    members: tuple[str, ...]
    candidate: str
    kl: float
    error: float
    scaled: bool = False


@dataclass(frozen=True)
class HarmSubject:
    """What is measured.

    Args:
        candidates: name -> linear's full name -> its scheme; linears that are not named stay as they are.
        calibration: ids [samples, tokens] for passes that look at data; None where none does.
        ids: [samples, tokens] that the harm is measured on.
        probe_ids: a few tokens to trace blocks with.
        widest: the largest number of features of any activation.
        dtype: of what stays in high precision.
        anchor: the candidate that is measured at the output; None measures all.
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
    """Measure the harms of all units of blocks `start` and up, a wave at a time, in the order of the blocks.

    `tell` gets the share done, 0..1.
    """
    return _Measurement(subject, start, tell or (lambda done: None)).waves()


class _Measurement:
    """The unchanged model's states at the present block, on both texts, and the variants of a wave."""

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
        """Bring both texts behind a block of the unchanged model."""
        self.clean = self.calls.run_all(module, index, self.clean)
        if self.calibrated is not None and self.calibration is not None:
            self.calibration = self.calibrated.run_all(module, index, self.calibration)

    @torch.no_grad()
    def _wave(self, first: int) -> tuple[list[UnitHarm], int]:
        """Return the harms of blocks from `first` to the returned one."""
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
        head = Head(model, self.subject.stream.path, self.subject.stream.flow)
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
        """Return the share done, by the blocks that variants have passed: those of block i pass n − i."""
        count = self.count
        whole = (count - self.start) * (count - self.start + 1) / 2
        before = sum(count - block for block in range(self.start, first))
        mine = sum(count - block for block in range(first, last))
        passed = sum(min(index, count) - block for block in range(first, last))
        # the head takes about as long as a few blocks: a wave is done when it is scored
        return (before + (mine if index >= count else 0.9 * min(passed, mine))) / whole

    def _variants(self, index: int, clean: Tensor, calibration: Tensor | None) -> list[_Variant]:
        """Make a block's variants from its inputs `clean` and `calibration`; only those to carry on keep states."""
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
    """A unit in a candidate: the error it leaves behind its block, and its hidden states, if they are carried on."""

    block: int
    members: tuple[str, ...]
    candidate: str
    error: float
    state: Tensor | None
    kl: float | None = None


def _carried(variants: Sequence[_Variant]) -> list[_Variant]:
    return [variant for variant in variants if variant.state is not None]


def _harms(variants: Sequence[_Variant]) -> list[UnitHarm]:
    """Return the measured harms, and those scaled from them."""
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
    """Yield the full names of a unit's linears, and the values of their codes by name within the block."""
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
    """Replace the weights of some linears of a module, for a while."""
    kept = {name: module.get_submodule(name).weight for name in values}
    for name, value in values.items():
        set_weight(module.get_submodule(name), value)
    try:
        yield
    finally:
        for name, weight in kept.items():
            module.get_submodule(name).weight = weight


class _Before(Pass):
    """A step just before codes are assigned, that keeps the block as it is there: folded, in full precision."""

    name = "tune-before"
    Settings: Any = None

    def __init__(self) -> None:
        self.module: nn.Module | None = None

    def run(self, block: Block, stats: Stats, settings: Any) -> Outcome:
        """Keep a copy."""
        self.module = copy.deepcopy(block.module)
        return Outcome(False)


class _OneBegin:
    """A stream whose first calls are recorded once for each text, not for every block that is worked on."""

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
    """Average the KL from `reference` of each of `states`, last hidden states [samples, tokens, width], nats a token.

    Memory is a few positions of three models' logits.
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
    """Give the KL of each position [P] from softmaxed logits and both logits [P, V], by the formula above; >= 0.

    A common shift of all logits changes nothing; it is taken off first, so that only what matters is rounded.
    """
    moved = changed - original
    moved -= (weights * moved).sum(dim=-1, keepdim=True)
    mean = (weights * moved).sum(dim=-1)
    grown = (weights * moved.expm1_()).sum(dim=-1)
    return (grown.log1p_() - mean).clamp_(min=0.0)
