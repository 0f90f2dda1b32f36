"""Quantized activations, bit for bit as compressed-tensors computes them."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import compute_dynamic_scales_and_zp
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs

from quantkit.calibrate.statistics.observed import Observed
from quantkit.formats.base.activation import InputScale, fake_quantize, parameters
from quantkit.model.streaming.transforms import QuantizedInput
from quantkit.scheme import ActivationScheme


def values(dtype: torch.dtype) -> torch.Tensor:
    """[2, 5, 64] over five decades, with a token of zeros and one without negative values."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64) * torch.logspace(-3, 2, 64)
    x[0, 0] = 0
    x[1, 1].abs_()
    return x.to(dtype)


def arguments(scheme: ActivationScheme) -> Any:
    return QuantizationArgs(
        num_bits=8,
        type="int" if scheme.format == "int8" else "float",
        symmetric=scheme.symmetric,
        strategy=scheme.granularity,
        dynamic=scheme.dynamic,
        group_size=scheme.group,
    )


# floats have no zero point
FORMATS = [("int8", True), ("int8", False), ("fp8_e4m3", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "symmetric"), FORMATS)
@pytest.mark.parametrize("granularity", ["token", "tensor", "group"])
def test_dynamic_is_what_compressed_tensors_computes(
    form: str, granularity: str, symmetric: bool, dtype: torch.dtype
) -> None:
    group = 32 if granularity == "group" else None
    scheme = ActivationScheme.model_validate(
        {"format": form, "granularity": granularity, "symmetric": symmetric, "group": group}
    )
    x, how = values(dtype), arguments(scheme)
    kept = x.clone()
    scale, zero = compute_dynamic_scales_and_zp(x, how, torch.nn.Module())
    found = fake_quantize(x, scheme)
    assert torch.equal(found, theirs(x, scale, zero, how)) and found.dtype == dtype
    assert torch.equal(x, kept)
    assert not torch.equal(found, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "symmetric"), FORMATS)
def test_tokens_without_a_batch_share_a_scale_in_compressed_tensors_alone(
    form: str, symmetric: bool, dtype: torch.dtype
) -> None:
    scheme = ActivationScheme.model_validate({"format": form, "granularity": "token", "symmetric": symmetric})
    how, batch = arguments(scheme), values(dtype)
    for x in (batch, batch[1], batch[:, None], batch.unflatten(1, (5, 1))):
        scale, zero = compute_dynamic_scales_and_zp(x, how, torch.nn.Module())
        assert torch.equal(QuantizedInput(scheme, library=True).quantize(x), theirs(x, scale, zero, how))
    own = QuantizedInput(scheme).quantize(batch[1])
    assert torch.equal(own, QuantizedInput(scheme, library=True).quantize(batch[1:])[0])
    assert not torch.equal(own, QuantizedInput(scheme, library=True).quantize(batch[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "symmetric"), FORMATS)
def test_static_is_what_compressed_tensors_computes_and_saturates(
    form: str, symmetric: bool, dtype: torch.dtype
) -> None:
    scheme = ActivationScheme(format=form, granularity="tensor", dynamic=False, symmetric=symmetric)
    x = values(dtype)
    scale, zero = parameters(torch.tensor([-3.0]).to(dtype), torch.tensor([20.0]).to(dtype), scheme)
    found = fake_quantize(x, scheme, InputScale(scale, zero))
    assert torch.equal(found, theirs(x, scale, zero, arguments(scheme)))
    assert float(x.abs().max()) > 100
    assert float(found.abs().max()) < 25


@pytest.mark.parametrize("planted", [float("nan"), float("inf")])
@pytest.mark.parametrize(("form", "symmetric"), FORMATS)
def test_a_number_that_is_none_does_not_become_a_code(form: str, symmetric: bool, planted: float) -> None:
    scheme = ActivationScheme(format=form, symmetric=symmetric)
    x = values(torch.float16)
    x[1, 2, 40] = planted
    assert fake_quantize(x, scheme).isnan().all(dim=-1).nonzero().tolist() == [[1, 2]]
    assert fake_quantize(x, scheme).isnan().sum() == 64
    fixed = ActivationScheme(format=form, granularity="tensor", dynamic=False, symmetric=symmetric)
    scale = InputScale(*parameters(torch.tensor([-3.0]).half(), torch.tensor([20.0]).half(), fixed))
    if planted != planted:  # noqa: PLR0124 (NaN)
        assert fake_quantize(x, fixed, scale).isnan().nonzero().tolist() == [[1, 2, 40]]


def test_two_rows_of_one_tensor_do_not_touch_each_other() -> None:
    """By token, also where the input has two dimensions, as an expert's has."""
    x = values(torch.float32)[1]
    scheme = ActivationScheme(format="int8")
    apart = torch.stack([fake_quantize(row[None], scheme)[0] for row in x])
    assert torch.equal(fake_quantize(x, scheme), apart)
    assert torch.equal(fake_quantize(x[:0], scheme), x[:0])


@pytest.mark.parametrize("how", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_fixed_range_is_the_same_in_any_chunks(how: str, symmetric: bool) -> None:
    scheme = ActivationScheme.model_validate(
        {"format": "int8", "granularity": "tensor", "dynamic": False, "symmetric": symmetric, "range": how}
    )
    torch.manual_seed(1)
    x = torch.randn(1, 40_000)
    x[0, 7] = 200.0
    scales, beyond = [], []
    for parts in (1, 7):
        observed = Observed(counted=how != "minmax")
        for part in x.chunk(parts, dim=1):
            observed.add(part)
        found, outside, total = observed.settle(scheme, torch.float32)
        scales.append(float(found.scale))
        beyond.append(outside)
        assert total == (0 if how == "minmax" else 40_000)
        back = fake_quantize(x, scheme, found)
    assert scales[0] == scales[1] and beyond[0] == beyond[1]
    span = 200.0 if symmetric else 200.0 - float(x.min())
    if how == "minmax":
        assert scales[0] == pytest.approx(span / (127.5 if symmetric else 255), rel=1e-6) and not any(beyond)
    else:
        assert scales[0] * 127.5 < (100 if how == "percentile" else 180) and beyond[0] >= 1
    if how == "mse":
        for other in ("minmax", "percentile"):
            whole = Observed(counted=other != "minmax")
            whole.add(x)
            scale, _, _ = whole.settle(scheme.model_copy(update={"range": other}), torch.float32)
            assert float((back - x).square().sum()) < float((fake_quantize(x, scheme, scale) - x).square().sum())


def test_a_fixed_scale_is_held_in_the_models_dtype() -> None:
    scheme = ActivationScheme(format="int8", granularity="tensor", dynamic=False)
    observed = Observed(counted=False)
    observed.add(torch.tensor([[-1.0, 3.3]]))
    found, _, _ = observed.settle(scheme, torch.bfloat16)
    assert found.scale.dtype == torch.bfloat16 and found.zero is None
    assert float(found.scale) == float(torch.tensor(3.3 / 127.5).to(torch.bfloat16))


@pytest.mark.parametrize("zero", [None, 3])
def test_a_scale_that_is_stored_shorter_is_computed_with_in_the_dtype_of_the_input(zero: int | None) -> None:
    scheme = ActivationScheme(format="int8", granularity="tensor", dynamic=False, symmetric=zero is None)
    scale = torch.tensor([0.0301], dtype=torch.bfloat16)
    static = InputScale(scale, None if zero is None else torch.tensor([zero], dtype=torch.int8))
    x = values(torch.float32)
    found = fake_quantize(x, scheme, static)
    assert found.dtype == torch.float32
    wide = InputScale(scale.float(), static.zero)
    assert torch.equal(found, fake_quantize(x, scheme, wide))
