"""What there is no memory for is told apart from everything else that goes wrong, by whatever is really raised."""

from __future__ import annotations

import errno

import pytest
import torch

from quantkit.model.device import is_out_of_memory, out_of_memory


def test_torchs_own_error_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    said = out_of_memory("a model", caught.value)
    assert (said.code, said.where) == ("out-of-memory", "a model")
    assert "allocate" in str(said) or "memory" in str(said)


def test_what_was_raised_from_it_is_too() -> None:
    with pytest.raises(ValueError, match="a class") as caught:
        try:
            torch.empty(1 << 50)
        except RuntimeError as problem:
            raise ValueError("a class made something of it") from problem
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOMEM, "no memory")]
)
def test_every_kind(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert out_of_memory("x", error).value


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "full"), ValueError("1")])
def test_other_trouble_is_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
