"""Weights that are corrected for the drift of their inputs."""

import pytest
import torch
from reference.gptq_oracle import aimed

from quantkit.errors import InputError
from quantkit.passes.solvers.correction import corrected


def drifted(columns, tokens=400, seed=0, mixed=0.2):
    """Inputs, and what they were before they drifted, in part by what the others hold."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + mixed * torch.randn(columns, columns, generator=generator)
    seen = torch.randn(tokens, columns, generator=generator) @ mix
    noise = torch.randn(tokens, columns, generator=generator)
    return seen, seen + 0.1 * seen.roll(1, dims=1) + 0.05 * noise


@pytest.mark.parametrize("shape", [(1, 3), (17, 48), (5, 1)])
@pytest.mark.parametrize("ridge", [0.0, 0.4, 9.0])
def test_corrected_weights_are_what_the_oracle_aims_at(shape, ridge):
    rows, columns = shape
    seen, original = drifted(columns)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    other = 2 * torch.randn(4, columns, generator=torch.Generator().manual_seed(2))
    lag = torch.randn(len(seen), 4, generator=torch.Generator().manual_seed(3))
    hessian, drift = seen.T @ seen, (original - seen).T @ seen
    damped = 0.02 * hessian.diagonal().mean() * torch.eye(columns)
    ridged = hessian + ridge * torch.diag(hessian.diagonal()) + (1 + ridge) * damped
    copies = weight.clone(), drift.clone(), hessian.clone()
    for share in (1.0, 0.4):
        found = corrected([weight, other], hessian, drift, [None, lag.T @ seen], ridge=ridge, share=share, damping=0.02)
        for before, after, more in zip((weight, other), found, (0.0, lag), strict=True):
            expected = before + share * (aimed(before, seen, original, ridged, more) - before)
            assert float((after - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert all(torch.equal(*pair) for pair in zip((weight, drift, hessian), copies, strict=True))


def test_corrected_weights_put_out_what_the_original_did():
    seen, original = drifted(32, mixed=0.05)  # well conditioned, or float32 alone would miss the best by more
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    (better,) = corrected([weight], seen.T @ seen, (original - seen).T @ seen, ridge=0.0, damping=0.0)
    missed = [float((seen @ each.T - original @ weight.T).square().sum()) for each in (weight, better)]
    best = torch.linalg.lstsq(seen, original @ weight.T).solution
    assert missed[1] < 0.5 * missed[0]
    assert missed[1] == pytest.approx(float((seen @ best - original @ weight.T).square().sum()), rel=1e-4)


def test_a_ridge_never_corrects_too_much():
    """Inputs that are nearly one: the inverse of a Hessian with small entries beside its diagonal is far too large."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(500, 1, generator=generator) + 0.05 * torch.randn(500, 32, generator=generator)
    original = 1.3 * seen
    weight = torch.ones(1, 32)
    missed = []
    for ridge in (0.0, 0.5, 2.0, 20.0):
        (better,) = corrected([weight], seen.T @ seen, (original - seen).T @ seen, ridge=ridge, damping=0.0)
        wanted, found = (original @ weight.T).squeeze(), (seen @ better.T).squeeze()
        assert float((found / wanted).median()) < 1.01
        missed.append(float((found - wanted).square().sum()))
    assert missed == sorted(missed)
    assert missed[-1] < float((seen @ weight.T - original @ weight.T).square().sum())


def test_a_ridge_serves_text_that_was_not_seen():
    generator = torch.Generator().manual_seed(4)
    mix = torch.eye(96) + 0.1 * torch.randn(96, 96, generator=generator)
    seen, unseen = (torch.randn(tokens, 96, generator=generator) @ mix for tokens in (128, 4096))
    # what the inputs were before is not to be foretold from them in full
    then, now = (x + 0.02 * x.roll(1, 1) + 0.2 * torch.randn(x.shape, generator=generator) for x in (seen, unseen))
    weight = torch.randn(32, 96, generator=generator)
    missed = []
    for ridge in (0.0, 2.0):
        (better,) = corrected([weight], seen.T @ seen, (then - seen).T @ seen, ridge=ridge)
        missed.append(float((unseen @ better.T - now @ weight.T).square().sum()))
    assert missed[1] < missed[0]


def test_inputs_never_seen_are_left_as_they_are():
    seen, original = drifted(16)
    seen[:, 3] = original[:, 3] = 0
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    (found,) = corrected([weight], seen.T @ seen, (original - seen).T @ seen, ridge=0.0)
    assert torch.equal(found[:, 3], weight[:, 3])
    (nothing,) = corrected([weight], torch.zeros(16, 16), torch.zeros(16, 16))
    assert torch.equal(nothing, weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_drift_that_is_not_finite_is_an_error(bad):
    drift = torch.zeros(8, 8)
    drift[1, 2] = bad
    for sums in ((drift,), (None, [drift[:2]])):
        with pytest.raises(InputError, match=r"\[drift-nonfinite\]"):
            corrected([torch.ones(2, 8)], torch.eye(8), *sums)
