"""GPTQ: second-order rounding, in which every column compensates the errors of those before it.

Frantar et al., "GPTQ", 2023, arXiv 2210.17323; the solver is `solvers/gptq.py`. Here: one Hessian and one factor per
shared input, in the order in which the block runs. So every linear is fitted to its real inputs, and
compensates their drift from the original ones (Li et al., "GPTAQ", 2025, arXiv 2504.02692).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from quantkit.content import Closed
from quantkit.lazy import torch
from quantkit.passes import GRADIENTS, UNGRADED, Outcome, Pass, decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from quantkit.calibrate.statistics.parts import Piece
    from quantkit.passes import Block, InputStats, Moments, QuantTensor, SharedInput, Stats, Tensor, WeightScheme
    from quantkit.passes.solvers.factor import Factor


# of the curvature by outputs
_DAMPING = 0.01
# elements of weights with one input, or of a Hessian on two threads, up to which each is worth a thread rather than
# several; of a Hessian on more threads
_SMALL, _TINY = 1 << 23, 1 << 20


class Gptq(Pass):
    """Pass `gptq`."""

    name = "gptq"
    paper = "arXiv 2210.17323"
    needs = frozenset({"hessian"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """Settings of the solver.

        Args:
            damping: share of the Hessian's mean diagonal that is added to it; raised, with a record, if necessary.
            shrink: share taken off the Hessian's off-diagonal entries: a few thousand tokens overstate how well one
                input can compensate another, which overfits. `auto` estimates the random share from two halves.
            correction: share of the inputs' drift that weights compensate before they are rounded: earlier blocks and
                linears are quantized, so the inputs, and the stream to which outputs are added, differ from the
                original. 0 saves a forward of the original model.
            ridge: caution of the correction: 0 trusts the calibration text; more drops corrections from few tokens.
            act_order: whether to choose the most important columns first; ranges stay static groups.
            range: choice of a group's range: `minmax`, `mse`, or `hessian` (error weighted by the Hessian's diagonal).
            sweeps: rounds of coordinate descent on the codes afterwards.
            refit: whether to fit the scales to the codes between sweeps; for groups up to 64.
            gradients: number of calibration sequences whose gradients weigh the errors of outputs, so that later rows
                compensate those of earlier ones, and sweeps heed those of all. For linears of a decoder's blocks, not
                for its head; costs three forwards of each sequence.
            unsaturated: whether to bound int8 codes, with one scale a channel, by their neighbours, so that two
                products with unsigned bytes fit 16 bits, as x86 processors without VNNI add them. Signed codes are then
                exact in the fastest kernels everywhere, for 1.5 times the squared error (`int7`: 4 times).
        """

        damping: float = Field(default=0.01, ge=0)
        shrink: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
        correction: float = Field(default=0.0, ge=0, le=1)
        ridge: float = Field(default=2.0, ge=0)
        act_order: bool = True
        range: Literal["minmax", "mse", "hessian"] = "hessian"
        sweeps: int = Field(default=0, ge=0)
        refit: bool = True
        gradients: int = Field(default=0, ge=0)
        unsaturated: bool = False

        @model_validator(mode="after")
        def _each_alone(self) -> Self:
            if self.unsaturated and self.sweeps:
                raise ValueError("`unsaturated` needs `sweeps: 0`: sweeps ignore its bounds")
            if self.gradients and self.unsaturated:
                raise ValueError("`gradients` needs `unsaturated: false`: its bounds see one row alone")
            return self

    def needs_with(self, settings: Settings) -> frozenset[str]:
        """Add the original stream if anything is corrected, and gradients if they are asked for."""
        corrected = {"original_inputs"} if settings.correction else set[str]()
        return self.needs | corrected | ({GRADIENTS} if settings.gradients else set())

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block, stage by stage."""
        from quantkit.formats.base.grid import load_grid
        from quantkit.model.device import one_thread, spread
        from quantkit.passes.assign import assign
        from quantkit.passes.solvers.correction import ridged
        from quantkit.passes.solvers.factor import factor, raised_damping
        from quantkit.passes.solvers.gptq import gptq_shared, together
        from quantkit.passes.solvers.moments import filled
        from quantkit.passes.solvers.unsaturated import bounded, neighbours

        outcome = Outcome(True)

        def visit(whole: SharedInput, seen: InputStats) -> None:
            factors: dict[tuple[int, int], Factor] = {}
            raised, where = stats.raised.get(whole.name, 0), block.full_name(whole.name)
            share = seen.noise if settings.shrink == "auto" else settings.shrink
            alike = block.alike(whole.members)
            for names in alike:
                scheme = block.scheme(names[0])
                weights = [block.weight(name) for name in names]
                width = weights[0].shape[1]
                last = len(alike) == 1  # use of these sums
                hessian = filled(seen.taken() if last else seen.hessian, width, width)
                key = width, together(load_grid(scheme.format))
                drift: Tensor | None = None
                lags: list[Tensor | None] = []
                if settings.correction:
                    drift = filled(seen.taken_drift() if last else seen.drift, width, width)
                    lags = [filled(seen.taken_lag(name), width) for name in names]
                drifted = drift is not None or any(lag is not None for lag in lags)
                # a larger one is factored on all threads
                new, small = key not in factors, hessian.numel() <= (_SMALL if torch.get_num_threads() <= 2 else _TINY)
                solving = partial(
                    factor,
                    hessian,
                    damping=settings.damping,
                    shrink=share,
                    act_order=settings.act_order,
                    together=key[1],
                    raised=raised,
                    where=where,
                    own=last and not (drifted and small),
                    whole=settings.sweeps > 0,
                )
                moved: Callable[[Piece, list[Tensor]], list[Tensor]] | None = None
                if drifted:
                    damping = raised_damping(settings.damping, raised)
                    ridging = partial(ridged, hessian, ridge=settings.ridge, damping=damping)
                    if new and small:  # both factors at the same time
                        with one_thread(hessian) as threads:
                            ridge, factors[key] = spread(lambda make: make(), [ridging, solving], threads)
                    else:
                        ridge = ridging()
                    moved = partial(_moved, ridge, drift, lags, settings)
                    del ridge, ridging
                if moved is not None and stats.ranks is None:  # before there is a second factor, if it is large
                    weights, moved = moved([(number, slice(None)) for number in range(len(names))], weights), None
                del drift, lags
                if new:
                    factors[key] = factors[key] if key in factors else solving()
                    stats.doubt(factors[key].pivots, whole.name, again=True)
                    if factors[key].raised:
                        reason = f"the Hessian of {seen.tokens} tokens had no Cholesky factor"
                        raised_to = factors[key].damping
                        outcome.note(self.name, "damping-raised", where, reason, settings.damping, raised_to)
                del solving
                del hessian
                bounds = neighbours(width).to(weights[0].device) if settings.unsaturated and bounded(scheme) else None

                def solve(
                    piece: Piece,
                    names: list[str] = names,
                    weights: list[Tensor] = weights,
                    moved: Callable[[Piece, list[Tensor]], list[Tensor]] | None = moved,
                    key: tuple[int, int] = key,
                    bounds: Tensor | None = bounds,
                ) -> list[tuple[QuantTensor, Tensor]]:
                    parts = [weights[number][rows] for number, rows in piece]
                    parts = parts if moved is None else moved(piece, parts)
                    graded = settings.gradients and any(name in stats.gradients for name in names)
                    told = [(stats.gradients.get(name), block.full_name(name), parts[0].device) for name in names]
                    outputs = [partial(_outputs, *one, whole=settings.sweeps > 0) for one in told]
                    how = {**_chosen(settings), "outputs": outputs if graded else None}
                    results = gptq_shared(parts, factors[key], block.scheme(names[0]), neighbours=bounds, **how)
                    return [(result.tensor, result.costs) for result in results]

                results = stats.by_rows([len(weight) for weight in weights], solve, apart=scheme.rows_apart)
                del moved, solve
                if last:
                    factors.clear()
                for name in names if settings.gradients else ():
                    if name not in stats.gradients:  # an expert
                        reason = "no token of the sequences with gradients reaches it"
                        outcome.note(self.name, UNGRADED, block.full_name(name), reason, settings.gradients, 0)
                for _, costs in results if drifted else ():  # their cost shows whether there was a second factor
                    stats.doubt(costs, whole.name, again=True)
                pairs = [(name, tensor) for name, (tensor, _) in zip(names, results, strict=True)]
                if sum(weight.numel() for weight in weights) <= _SMALL:  # for torch's own threads
                    with one_thread(weights[0]) as threads:
                        errors = spread(lambda pair: assign(block, *pair), pairs, threads)
                else:
                    errors = [assign(block, *pair) for pair in pairs]
                outcome.errors |= dict(zip(names, errors, strict=True))

        measured = {"noise": settings.shrink == "auto", "drift": settings.correction > 0, "moments": False}
        stats.staged(visit, **measured, quantized=True)
        return outcome

    def product(self, weight: Tensor, moments: Moments | None, scheme: WeightScheme, settings: Settings) -> QuantTensor:
        """Return codes of a graph's product or a head; every group of its rows has its own Hessian.

        `correction` is W' = W E[x x̂ᵀ] (E[x̂ x̂ᵀ] + λ)⁻¹. A weight with one scale and several groups is rounded to
        nearest, since every group would find another scale; so is a weight whose inputs are unknown.
        """
        from quantkit.formats import QuantTensor, joined
        from quantkit.formats.base.grid import load_grid
        from quantkit.passes.assign import nearest
        from quantkit.passes.solvers.correction import corrected_by_moments
        from quantkit.passes.solvers.factor import awaited
        from quantkit.passes.solvers.gptq import gptq, together
        from quantkit.passes.solvers.gptq_rows import gptq_rows
        from quantkit.passes.solvers.unsaturated import bounded, neighbours

        if moments is None or (len(moments.hessian) > 1 and not scheme.rows_apart):
            return nearest(weight, scheme)
        groups, width = moments.hessian.shape[:2]
        parts = weight.reshape(groups, -1, width)
        if settings.correction:
            parts = corrected_by_moments(parts, moments, ridge=settings.ridge, share=settings.correction)
        shrink = moments.noise if settings.shrink == "auto" else settings.shrink
        how: dict[str, Any] = {"damping": settings.damping, "shrink": shrink}
        unit = together(load_grid(scheme.format))
        if moments.by_row and (settings.act_order, settings.range, settings.sweeps) == (True, "hessian", 0):
            hessians = moments.hessian.repeat_interleave(parts.shape[1], 0)
            codes, scale = gptq_rows(parts.flatten(0, 1).float(), hessians, scheme, **how)
            return QuantTensor(codes, scale[:, None], None, scheme)
        bounds = moments.neighbours
        if bounds is None and settings.unsaturated and bounded(scheme):
            bounds = neighbours(width).to(weight.device)
        tensors = []
        for number, (part, hessian) in enumerate(zip(parts.float(), moments.hessian, strict=True)):

            def solved(hessian: Tensor = hessian) -> Factor:
                factor = awaited(
                    hessian.float(), act_order=settings.act_order, together=unit, where=moments.name, **how
                )
                if factor.raised:
                    reason = "the Hessian of its inputs had no Cholesky factor"
                    figures = (settings.damping, factor.damping)
                    moments.decisions.append(decision(self.name, "damping-raised", moments.name, reason, *figures))
                return factor

            factor = moments.once((number, *how.values(), settings.act_order, unit), solved)
            tensors.append(gptq(part, factor, scheme, neighbours=bounds, **_chosen(settings)).tensor)
        return joined(tensors)


def _moved(
    ridge: Factor,
    drift: Tensor | None,
    lags: list[Tensor | None],
    settings: Gptq.Settings,
    piece: Piece,
    parts: list[Tensor],
) -> list[Tensor]:
    """Return some rows of weights, corrected for the drift of their inputs."""
    from quantkit.passes.solvers.correction import corrected

    behind = [lag if (lag := lags[number]) is None else lag[rows] for number, rows in piece]
    return corrected(parts, ridge, drift, behind, ridge=settings.ridge, share=settings.correction)


def _outputs(gradients: Tensor | None, name: str, place: torch.device, *, whole: bool) -> Factor | None:
    """Factor the curvature of the loss by a linear's outputs, shrunk by what two halves of the tokens agree on."""
    from quantkit.calibrate.statistics.gradients import curvature
    from quantkit.passes.solvers.factor import awaited

    if gradients is None:
        return None
    seen = curvature(gradients.to(place), name)
    noise = seen.noise  # before the sums become the factor
    how: dict[str, Any] = {"damping": _DAMPING, "shrink": noise, "act_order": True, "own": True}
    return awaited(seen.taken(), where=name, whole=whole, **how)


def _chosen(settings: Gptq.Settings) -> dict[str, Any]:
    return {"range": settings.range, "sweeps": settings.sweeps, "refit": settings.refit}


PASS: Pass = Gptq()
