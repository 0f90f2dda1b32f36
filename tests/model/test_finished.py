"""What passes decided, on disk and back, one tensor at a time."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from quantkit.formats import QuantTensor, load_format
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.plugins import FORMATS
from quantkit.scheme import WeightScheme


def quantized(scheme: WeightScheme, shape: tuple[int, int] = (3, 8), seed: int = 0) -> QuantTensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found: QuantTensor = load_format(scheme.format).quantize(weight, scheme)
    return found


def same(left: QuantTensor, right: QuantTensor) -> bool:
    zeros = left.zero is right.zero is None or torch.equal(left.zero, right.zero)  # type: ignore[arg-type]
    scales = torch.equal(left.scale, right.scale) and left.scale.dtype == right.scale.dtype
    return torch.equal(left.codes, right.codes) and scales and zeros and left.scheme == right.scheme


def test_round_trip(tmp_path: Path) -> None:
    group = WeightScheme(format="int4", granularity="group", group=4, symmetric=False)
    tensor = WeightScheme(format="int8", granularity="tensor", scale="bfloat16")
    schemes = {"b.0.q": group, "b.0.o": tensor, "b.1.q": group, "b.2.q": group}
    first = {"b.0.q": quantized(group), "b.0.o": quantized(tensor, seed=1)}
    # a transposed view is stored as what it shows
    second = {"b.1.q": quantized(group, seed=2)}
    changed = {"b.0.norm.weight": torch.arange(6.0).reshape(2, 3).T.to(torch.bfloat16)}
    finished.save(tmp_path / "0", first, changed)
    finished.save(tmp_path / "1", second, {})
    found = Finished([tmp_path / "0", tmp_path / "1"], schemes)
    assert found.schemes == {"b.0.q": group, "b.0.o": tensor, "b.1.q": group}, "a layer without codes has no scheme"
    assert found.changed == ["b.0.norm.weight"]
    for name, tensors in {**first, **second}.items():
        assert same(found.quantized(name), tensors)
    assert torch.equal(found.tensor("b.0.norm.weight"), changed["b.0.norm.weight"])
    assert found.tensor("b.0.norm.weight").dtype == torch.bfloat16
    with pytest.raises(KeyError):
        found.quantized("b.2.q")


@pytest.mark.parametrize(
    "written",
    [
        {"format": "fp8_e4m3", "granularity": "block", "group": 16},
        {"format": "nf4", "group": 32, "scale": "double"},
        {"format": "mxfp4"},
        {"format": "nvfp4"},
        {"format": "q4_1"},
        {"format": "q4_k"},
        {"format": "q6_k"},
    ],
    ids=lambda written: str(written["format"]),
)
def test_whatever_a_format_stores_comes_back(tmp_path: Path, written: dict[str, object]) -> None:
    """Two linears of one format: a codebook that they have in common is stored with each."""
    scheme = WeightScheme.model_validate(written)
    tensors = {name: quantized(scheme, (20, 256), seed) for seed, name in enumerate("ab")}
    finished.save(tmp_path / "0", tensors, {})
    found = Finished([tmp_path / "0"], dict.fromkeys("ab", scheme))
    assert found.changed == []
    form = load_format(scheme.format)
    for name, tensor in tensors.items():
        back = found.quantized(name)
        assert torch.equal(form.dequantize(back), form.dequantize(tensor))
        for field in dataclasses.fields(QuantTensor):
            here, there = getattr(back, field.name), getattr(tensor, field.name)
            assert (here is None) == (there is None)
            if isinstance(here, torch.Tensor):
                assert here.dtype == there.dtype
                assert torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))
        for part, names in (("nested", ("codes", "absmax", "offset")), ("super_blocks", ("d", "sc"))):
            if getattr(tensor, part) is not None:
                pairs = [[getattr(getattr(side, part), name) for side in (back, tensor)] for name in names]
                assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("written", ["int4 with zeros", *(name for name in FORMATS.shipped() if "float" not in name)])
def test_codes_of_up_to_four_bits_share_bytes(tmp_path: Path, written: str, rows: int) -> None:
    name, _, zeros = written.partition(" ")
    how = {"granularity": "group", "group": 32, "symmetric": not zeros} if name.startswith("int") else {}
    scheme = WeightScheme.model_validate({"format": name, **how})
    tensor = quantized(scheme, (rows, 256))
    stored = finished.flat({"a": tensor}, {})
    together = load_format(name).bits <= 4 and tensor.offset is None and rows % 2 == 0
    assert sum(value.nbytes for key, value in stored.items() if "codes" in key or "joined" in key) == (
        tensor.codes.nbytes // 2 if together else tensor.codes.nbytes
    )
    digest = finished.save(tmp_path / "0", {"a": tensor}, {})
    assert digest == hashlib.sha256((tmp_path / "0").read_bytes()).hexdigest()
    found = Finished([tmp_path / "0"], {"a": scheme})
    back = found.quantized("a")
    assert back.codes.dtype == tensor.codes.dtype
    assert torch.equal(back.codes.view(torch.uint8), tensor.codes.view(torch.uint8))
    assert found.quantized("a", codes=False).shape == tensor.shape


def test_nothing_decided_is_nothing_found(tmp_path: Path) -> None:
    assert Finished([], {"a": WeightScheme(format="int8")}).schemes == {}
    finished.save(tmp_path / "empty", {}, {})
    found = Finished([tmp_path / "empty"], {})
    assert (found.schemes, found.changed) == ({}, [])


def test_what_was_read_is_a_copy(tmp_path: Path) -> None:
    finished.save(tmp_path / "0", {}, {"w": torch.ones(2)})
    found = Finished([tmp_path / "0"], {})
    found.tensor("w").zero_()
    assert found.tensor("w").tolist() == [1.0, 1.0]
