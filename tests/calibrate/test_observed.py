"""Ranges from a stream: against plain definitions, torch's observer and ONNX Runtime's calibrators."""

import contextlib
import io
from collections import Counter

import numpy as np
import pytest
import torch
from onnxruntime.quantization.calibrate import HistogramCollector
from reference import plain_ranges
from torch.ao.quantization.observer import MovingAverageMinMaxObserver

from quantkit.calibrate.statistics.observed import AT_ONCE, AVERAGING, COVERED, Observed
from quantkit.errors import InputError
from quantkit.scheme import ActivationScheme, CacheScheme

RANGES = ("minmax", "moving-average", "percentile", "entropy", "mse")


def scheme(how: str, *, symmetric: bool = False) -> ActivationScheme:
    return ActivationScheme.model_validate(
        {"format": "int8", "granularity": "tensor", "dynamic": False, "symmetric": symmetric, "range": how}
    )


def reach(samples: np.ndarray, how: str, *, symmetric: bool = False, chunk: int = 4) -> tuple[float, float]:
    """From where to where the grid goes, from samples [n, m] that come in chunks."""
    observed = Observed(counted=True)
    for part in torch.from_numpy(samples).split(chunk):
        observed.add(part.reshape(1, -1), part.shape[0])
    found, _, total = observed.settle(scheme(how, symmetric=symmetric), torch.float32)
    assert total == samples.size
    scale, zero = float(found.scale), 0 if found.zero is None else int(found.zero)
    if symmetric:
        return -127.5 * scale, 127.5 * scale
    return (-128 - zero) * scale, (127 - zero) * scale


def drawn(kind: str, count: int = 150, each: int = 400) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = {
        "normal": generator.standard_normal((count, each)),
        "laplace": generator.laplace(size=(count, each)),
        "relu": np.maximum(generator.standard_normal((count, each)), 0),
        "outlier": np.where(generator.random((count, each)) < 1e-4, 30.0, generator.standard_normal((count, each))),
    }[kind]
    return values.astype(np.float32)


@pytest.mark.parametrize("how", RANGES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_chunks_do_not_matter(how: str, symmetric: bool) -> None:
    samples = drawn("outlier")
    first, second = (reach(samples, how, symmetric=symmetric, chunk=chunk) for chunk in (1, 64))
    assert first == second
    assert first[0] < 0 < first[1] <= 30.2


@pytest.mark.parametrize("count", [1, 90, 150])
def test_the_moving_average_is_of_the_samples_extremes(count: int) -> None:
    samples = drawn("outlier", count)
    low, high = plain_ranges.moving_average(list(samples), AVERAGING)
    own = reach(samples, "moving-average")
    step = (own[1] - own[0]) / 255
    assert own == pytest.approx((low, high), abs=step), "the zero point is a whole number"
    _, top = reach(samples, "moving-average", symmetric=True)
    assert top == pytest.approx(max(-low, high), rel=1e-6)
    # order matters to what comes after the hundredth alone
    back = reach(samples[::-1].copy(), "moving-average", symmetric=True)[1]
    assert (back == pytest.approx(top, rel=1e-6)) == (count <= 100)


def test_from_the_hundredth_sample_on_it_is_torchs() -> None:
    samples = drawn("outlier")
    torchs = MovingAverageMinMaxObserver(averaging_constant=AVERAGING)
    torchs.min_val.fill_(float(samples[:100].min(axis=1).mean()))
    torchs.max_val.fill_(float(samples[:100].max(axis=1).mean()))
    for sample in samples[100:]:
        torchs(torch.from_numpy(sample))
    _, top = reach(samples, "moving-average", symmetric=True)
    assert top == pytest.approx(max(-float(torchs.min_val), float(torchs.max_val)), rel=1e-5)


def collected(samples: np.ndarray, how: str, symmetric: bool, bins: int, codes: int = 255) -> tuple[float, float]:
    """What ONNX Runtime makes of the same values."""
    theirs = HistogramCollector(how, symmetric, bins, codes, 100 * COVERED, "same")
    with contextlib.redirect_stdout(io.StringIO()):
        theirs.collect({"x": samples.reshape(-1)})
        low, high = theirs.compute_collection_result()["x"][:2]
    return float(low), float(high)


@pytest.mark.parametrize("kind", ["normal", "laplace", "relu"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_percentile_is_that_of_all_values(kind: str, symmetric: bool) -> None:
    samples = drawn(kind, 149)  # no share of them is a whole number, which floats would decide
    own = reach(samples, "percentile", symmetric=symmetric)
    expected = plain_ranges.percentile(samples.reshape(-1), COVERED, symmetric=symmetric)
    step = (own[1] - own[0]) / 255
    # values are known to half of a 128th, ends are whole steps from zero
    assert own == pytest.approx(expected, rel=2**-8, abs=step)
    theirs = collected(samples, "percentile", symmetric, 2048)
    width = 2 * float(np.abs(samples).max()) / 2048
    assert own[1] == pytest.approx(theirs[1], rel=2**-8, abs=step + 2 * width)
    if not symmetric or kind != "relu":  # there, ONNX Runtime's symmetric range ends at 0
        assert own[0] == pytest.approx(theirs[0], rel=2**-8, abs=step + 2 * width)


@pytest.mark.parametrize("kind", ["normal", "laplace", "outlier"])
def test_entropy_is_as_good_as_by_the_definition_and_in_onnxruntime(kind: str) -> None:
    samples = drawn(kind)
    # one end is looked for, as there: the other is as far
    samples = np.concatenate([samples, -samples])
    values = samples.reshape(-1)
    whole = float(np.abs(values).max())
    edges = np.linspace(-whole, whole, 4097)
    bins = Counter((np.searchsorted(edges, values, side="right") - 1).clip(max=4095).tolist())

    def cost(top: float) -> float:
        return plain_ranges.divergence(bins, edges, -top, top)

    own = cost(reach(samples, "entropy", symmetric=True)[1])
    # the curve is flat and ragged where tails are thin: what is found is as good, if not the same
    assert own <= 1.08 * min(cost(whole * number / 32) for number in range(32, 1, -1))
    assert own <= 1.05 * cost(collected(samples, "entropy", True, 1025)[1])
    if kind == "outlier":
        assert own < 0.5 * cost(whole)


def test_zeros_of_a_relu_do_not_narrow_the_range() -> None:
    samples = drawn("relu")
    own = reach(samples, "entropy")
    assert own == reach(samples[samples > 0].reshape(1, -1), "entropy")
    assert own[0] == 0
    assert own[1] > 0.8 * samples.max()
    # half of all values in the one bin at zero: ONNX Runtime saturates one in twenty of the others for it
    assert collected(samples, "entropy", True, 1025)[1] < 0.5 * samples.max()


def test_what_has_fewer_values_than_codes_is_kept_whole() -> None:
    samples = np.linspace(-1, 2, 50, dtype=np.float32)[None].repeat(3, axis=0)
    assert reach(samples, "entropy") == pytest.approx((-1, 2), abs=3 / 255)


def test_each_end_of_an_entropy_range_is_found_for_itself() -> None:
    samples = drawn("normal")
    samples[0, 0] = 20.0
    low, high = reach(samples, "entropy")
    assert high < 0.5 * 20
    assert low < 0.7 * samples.min()


@pytest.mark.parametrize("how", RANGES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0, -0.25, 1e-30])
def test_one_value_everywhere(how: str, symmetric: bool, value: float) -> None:
    for size in (1, 1000):
        observed = Observed(counted=True)
        observed.add(torch.full((1, size), value))
        assert observed.constant
        found, beyond, _ = observed.settle(scheme(how, symmetric=symmetric), torch.float32)
        scale, zero = float(found.scale), 0 if found.zero is None else int(found.zero)
        assert scale > 0
        assert beyond == 0
        assert (-128 - zero) * scale <= value + scale
        assert value - scale <= (127 - zero) * scale
    observed.add(torch.tensor([[value + 1]]))
    assert not observed.constant


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_has_no_range(bad: float) -> None:
    observed = Observed(counted=False, name="conv1")
    observed.add(torch.ones(1, 3))
    with pytest.raises(InputError, match=r"activations-nonfinite\] conv1: 1 of 4"):
        observed.add(torch.tensor([[0.0, 1.0, bad, 2.0]]))


def test_the_cache_has_these_ranges_too() -> None:
    assert CacheScheme.model_validate({"format": "int8", "granularity": "head", "range": "entropy"}).range == "entropy"
    rows = torch.from_numpy(drawn("outlier", 6, 4000).reshape(2, -1))
    observed = Observed(counted=True)
    observed.add(rows, 3)
    for how in RANGES:
        cache = CacheScheme.model_validate({"format": "fp8_e4m3", "granularity": "head", "range": how})
        found, _, _ = observed.settle(cache, torch.float32)
        assert found.scale.shape == (2,)
        assert bool((found.scale <= observed.settle(CacheScheme(format="fp8_e4m3"), torch.float32)[0].scale).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("how", AT_ONCE)
def test_what_a_gpu_is_not_waited_for_is_the_same(how: str, symmetric: bool) -> None:
    """Rows of other sizes, a hundred and more samples, zeros alone, positive values alone."""
    rows = torch.randn(4, 1200, generator=torch.Generator().manual_seed(4)) * torch.tensor(
        [[1.0], [30.0], [0.0], [1e-3]]
    )
    rows[1, 7], rows[3] = 900.0, rows[3].abs()
    observed = Observed(counted=how != "minmax")
    for part in rows.split(400, dim=1):
        observed.add(part, samples=40)
    asked = scheme(how, symmetric=symmetric)
    found, beyond, checked = observed.settle_at_once(asked, torch.bfloat16)
    expected, outside, total = observed.settle(asked, torch.bfloat16)
    assert torch.equal(found.scale, expected.scale)
    assert found.zero is None if expected.zero is None else torch.equal(found.zero, expected.zero)
    assert beyond.tolist() == [outside, total]
    assert torch.equal(checked, torch.cat([rows.amin(1), rows.amax(1)]))
