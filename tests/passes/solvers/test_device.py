"""Solvers on a device: kernels in Triton's interpreter against the CPU and float64, and few launches on a fake GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_gpu import gpu
from reference.gptq_oracle import cost
from reference.gptq_solved import Solve, levels

pytest.importorskip("triton")  # Linux alone has it

from thorough import beside

from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.layout import against
from quantkit.passes.solvers import awq, device, ranges
from quantkit.passes.solvers.correction import corrected
from quantkit.passes.solvers.factor import Factor, factor
from quantkit.passes.solvers.gptq import gptq_shared
from quantkit.passes.solvers.gptq_rows import gptq_rows
from quantkit.passes.solvers.hqq import half_quadratic
from quantkit.scheme import WeightScheme

# a group of zeros: 0 / 0, which the kernels look at
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
# a distance from a tie that float32 keeps
SAFE = 1e-5
GROUP = {"granularity": "group"}
SCHEMES: dict[str, dict[str, Any]] = {
    "int4 zeros g32": {"format": "int4", **GROUP, "group": 32, "symmetric": False},
    "int4 g64": {"format": "int4", **GROUP, "group": 64},
    "int2 zeros g48": {"format": "int2", **GROUP, "group": 48, "symmetric": False},
    "int3 channel": {"format": "int3", "granularity": "channel", "scale": "bfloat16"},
    "int8 zeros channel": {"format": "int8", "granularity": "channel", "symmetric": False, "scale": "float32"},
    "nf4 g64": {"format": "nf4", "group": 64},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "fp8_e4m3 channel": {"format": "fp8_e4m3", "granularity": "channel"},
}


def scheme(name: str) -> WeightScheme:
    return WeightScheme.model_validate(SCHEMES[name])


def problem(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mix
    inputs[:, columns // 3] *= 20
    weight = torch.randn(rows, columns, generator=generator)
    weight[0, :16] = 0
    return weight, inputs.T @ inputs


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Within it what would be done on a device is done in the interpreter."""

    @contextmanager
    def on() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(device, "launched", lambda tensor: True)
            yield

    return on


def spread(tensor: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the zero point of each weight, [N, K]."""
    shape = tensor.codes.shape
    parts = [tensor.scale.float(), torch.zeros(1) if tensor.zero is None else tensor.zero.float()]
    if tensor.global_scale is not None:
        parts[0] = parts[0] * tensor.global_scale
    if tensor.zero is None:
        parts[1] = torch.zeros_like(parts[0])
    width = tensor.codes.shape[1] // parts[0].shape[1]
    return tuple(against(part, shape, tensor.scheme).expand(-1, -1, width).reshape(shape) for part in parts)


@pytest.mark.parametrize(
    ("name", "act_order", "sweeps"),
    [
        *((name, True, 0) for name in SCHEMES),
        ("int4 zeros g32", False, 0),
        ("int4 g64", True, 1),
        pytest.param("nvfp4", False, 0, marks=pytest.mark.thorough),
        *(pytest.param(name, True, 1, marks=pytest.mark.thorough) for name in ("int2 zeros g48", "mxfp4")),
    ],
)
def test_codes_are_those_of_the_cpu_where_float64_says_which(
    name: str, act_order: bool, sweeps: int, by_kernel: Any
) -> None:
    """Rows and columns that no tile divides; two weights; rows in which no column came near a tie."""
    choice = scheme(name)
    columns = 144 if name == "int2 zeros g48" else 128 if name in ("int4 g64", "nf4 g64") else 96
    # two tiles of rows once: the interpreter takes as long for a tile as for a row
    weight, hessian = problem(22 if name == "int4 zeros g32" and act_order else 13, columns)
    weights = [weight[:-4], weight[-4:] * 2]
    solved = factor(hessian, act_order=act_order)
    options: dict[str, Any] = {"sweeps": sweeps, "refit": False, "range": "minmax"}
    expected = gptq_shared(weights, solved, choice, **options)
    with by_kernel():
        found = gptq_shared(weights, solved, choice, **options)
    for one, theirs, ours in zip(weights, expected, found, strict=True):
        exact = Solve(one, solved.hessian, *spread(theirs.tensor), levels(choice.format))
        exact.columns(solved.order).sweeps(sweeps)
        safe = exact.margin > SAFE
        assert safe.float().mean() > 0.5
        assert torch.equal(theirs.tensor.scale.float(), ours.tensor.scale.float())
        assert torch.equal(theirs.tensor.codes.float()[safe], ours.tensor.codes.float()[safe])
        values = load_format(choice.format).dequantize(ours.tensor)
        torch.testing.assert_close(values[safe].double(), exact.values[safe], rtol=1e-6, atol=1e-9)
        assert ours.error.shape == () and ours.error.dtype == torch.float64
        assert float(ours.error) == pytest.approx(cost(one, values, solved.hessian), rel=1e-5)


@pytest.mark.parametrize("name", beside(["int4 zeros g32"], ["int4 zeros g32", "int4 g64"]))
def test_sweeps_fit_the_scales_as_the_cpu_does(name: str, by_kernel: Any) -> None:
    choice = scheme(name)
    weight, hessian = problem(14, 128, seed=3)
    solved = factor(hessian)
    kept, expected = (gptq_shared([weight], solved, choice, sweeps=1, refit=refit)[0] for refit in (False, True))
    with by_kernel():
        (found,) = gptq_shared([weight], solved, choice, sweeps=1)
    assert (found.tensor.scale == expected.tensor.scale).float().mean() > 0.95
    assert (found.tensor.codes == expected.tensor.codes).float().mean() > 0.95
    assert float(found.error) == pytest.approx(float(expected.error), rel=1e-3)
    assert float(found.error) < float(kept.error)
    values = load_format(choice.format).dequantize(found.tensor)
    assert float(found.error) == pytest.approx(cost(weight, values, solved.hessian), rel=1e-5)


# blocks of a Hessian are for clipping, which is for integers
RANGES = [
    (name, kind) for name in SCHEMES for kind in ("plain", "importance", "hessian")[: 3 if name[:3] == "int" else 2]
]


@pytest.mark.parametrize(("name", "kind"), RANGES)
def test_ranges_are_those_of_the_cpu(name: str, kind: str, by_kernel: Any) -> None:
    choice, search = scheme(name), ranges.Search(smallest=0.6, steps=3, refinements=1)
    weight, hessian = problem(35 if name == "int4 zeros g32" else 25, 96 if name == "int2 zeros g48" else 64, seed=1)

    def asked() -> tuple[torch.Tensor, torch.Tensor | None]:
        if kind == "hessian":
            return ranges.for_output(weight, choice, hessian, search)
        return ranges.searched(weight, choice, None if kind == "plain" else hessian.diagonal(), search)

    scale, zero = asked()
    with by_kernel():
        found, shift = asked()
    assert found.dtype == scale.dtype and found.shape == scale.shape
    # another order of sums; a scale of 16 bits may then lie one step further
    torch.testing.assert_close(found.float(), scale.float(), rtol=1e-4 if scale.dtype.itemsize > 2 else 2**-7, atol=0)
    assert scale.dtype.itemsize > 2 or (found == scale).float().mean() > 0.97
    assert (shift is None) == (zero is None)
    assert zero is None or shift is None or (shift == zero).float().mean() > 0.97


@pytest.mark.parametrize("name", ["int4 zeros g32", "int3 channel"])
@pytest.mark.parametrize("gptq", [False, True])
def test_awq_finds_what_the_cpu_finds(name: str, gptq: bool, by_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(22, 64, seed=2)
    hessian[7], hessian[:, 7] = 0, 0
    options: dict[str, Any] = {"grid": 4, "producers": torch.arange(64) // 4, "channels": 16}
    options["importance"] = factor(hessian).importance if gptq else None
    weights = [weight[:17], weight[17:] * 2]
    expected = awq.search_scales(weights, hessian, scheme(name), **options)
    with by_kernel():
        found = awq.search_scales(weights, hessian, scheme(name), **options)
        monkeypatch.setattr(awq, "_MEMORY", 2 * 4 * 22 * 64 * 2)
        parts = awq.search_scales(weights, hessian, scheme(name), **options)
    assert float(found.alpha) == float(expected.alpha) == float(parts.alpha) > 0
    torch.testing.assert_close(found.scales, expected.scales)
    for ours in (found, parts):
        assert float(ours.cost) == pytest.approx(float(expected.cost), rel=1e-5)
        assert float(ours.plain) == pytest.approx(float(expected.plain), rel=1e-5)


@pytest.mark.parametrize("name", ["int4 zeros g32", "int4 g64", "int3 channel", "int8 zeros channel"])
def test_hqq_finds_what_the_cpu_finds(name: str, by_kernel: Any) -> None:
    """Groups that no piece divides, one of zeros; under the norm that the turns are for."""
    choice, (weight, _) = scheme(name), problem(9, 192, seed=5)
    weight[:, 7] *= 5
    expected = half_quadratic(weight, choice)
    with by_kernel():
        found = half_quadratic(weight, choice)

    def paid(grid: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        form = load_format(choice.format)
        values = form.dequantize(form.nearest(weight, *grid, choice))
        return (weight - values).abs().pow(0.7).reshape(grid[0].numel(), -1).sum(dim=1)

    ours, theirs = paid(found), paid(expected)
    assert found[0].dtype == expected[0].dtype and found[0].shape == expected[0].shape
    # a code between two may go either way, and the turns after it with it
    assert torch.isclose(ours, theirs, rtol=1e-4, atol=1e-6).float().mean() > 0.8
    assert float(ours.sum()) == pytest.approx(float(theirs.sum()), rel=2e-3)


def test_weights_make_up_for_a_drift_as_on_the_cpu(by_kernel: Any) -> None:
    weight, hessian = problem(22, 48, seed=4)
    generator = torch.Generator().manual_seed(8)
    drift, lag = (torch.randn(*shape, generator=generator) for shape in ((48, 48), (9, 48)))
    weights, lags = [weight[:13], weight[13:]], [None, lag]
    expected = corrected(weights, hessian, drift, lags)
    with by_kernel():
        found = corrected(weights, hessian, drift, lags)
    for ours, theirs, as_it_was in zip(found, expected, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ours, as_it_was, atol=1e-3)


# --- a GPU that is not there ------------------------------------------------------------------------------------------


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def factored(columns: int) -> Factor:
    order = empty(columns, dtype=torch.int64)
    # as a Cholesky factor that was turned round lies
    return Factor(empty(columns, columns), order, empty(columns, columns).T, empty(columns), 0.01, 0)


WIDE = {**SCHEMES, "fp8_e4m3 block": {"format": "fp8_e4m3", "granularity": "block", "group": 128}}
WIDE["nf4 double"] = {"format": "nf4", "group": 64, "scale": "double"}
WIDE["int4 tensor"] = {"format": "int4", "granularity": "tensor"}
# launches of a solve of three weights, with whatever lays and stores their scales: a block has four such inputs at most
GPTQ = {"int4 zeros g32": 25, "int4 g64": 20, "int8 zeros channel": 25, "nvfp4": 140, "nf4 double": 170, "mxfp4": 90}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("sweeps", [0, 2])
def test_gptq_is_few_launches_and_never_waits(name: str, sweeps: int) -> None:
    choice = WeightScheme.model_validate(WIDE[name])
    with gpu() as watch:
        found = gptq_shared([empty(64, 384), empty(32, 384), empty(32, 384)], factored(384), choice, sweeps=sweeps)
    assert not watch.waits
    for each in found:
        parts = [each.tensor.codes, each.tensor.scale, each.tensor.zero, each.tensor.codebook, each.error]
        assert {part.device.type for part in parts if part is not None} == {"cuda"}
    assert watch.operators["choose"] == 1 and watch.operators["descend"] == (sweeps > 0)
    if name in GPTQ:
        assert watch.operators.total() <= GPTQ[name] + 7 * (sweeps > 0)
    if name.startswith("int") and "tensor" not in name:
        assert watch.operators["search_integers"] == 1


@pytest.mark.parametrize("name", ["int4 zeros g32", "int3 channel", "int4 tensor"])
def test_awq_is_few_launches_and_never_waits(name: str) -> None:
    choice = WeightScheme.model_validate(WIDE[name])
    with gpu() as watch:
        weights, hessian = [empty(64, 384), empty(32, 384)], empty(384, 384)
        producers = empty(384, dtype=torch.int64)
        found = awq.search_scales(weights, hessian, choice, producers=producers, channels=96)
        assert {part.device.type for part in found} == {"cuda"}
        plain = watch.operators.total()
        awq.search_scales(weights, hessian, choice, importance=empty(384))
        if choice.granularity != "tensor":
            assert awq.clip(weights[0], hessian, choice).device.type == "cuda"
    assert not watch.waits
    assert watch.operators["losses"] == (4 if choice.granularity == "tensor" else 2)
    assert plain <= (60 if choice.granularity == "tensor" else 12)


@pytest.mark.parametrize("name", ["int4 zeros g32", "int3 channel", "int4 tensor"])
def test_hqq_never_waits(name: str) -> None:
    with gpu() as watch:
        scale, zero = half_quadratic(empty(64, 384), WeightScheme.model_validate(WIDE[name]))
        assert scale.device.type == "cuda" and (zero is None or zero.device.type == "cuda")
    assert not watch.waits
    if name != "int4 tensor":  # one group of all weights is no work for one program
        assert watch.operators.total() <= 6


def test_rows_with_hessians_of_their_own_never_wait() -> None:
    choice = WeightScheme(format="int8", granularity="channel", symmetric=True, scale="float32")
    with gpu() as watch:
        assert {part.device.type for part in gptq_rows(empty(8, 4), empty(8, 4, 4), choice)} == {"cuda"}
    assert not watch.waits
