"""Codes of any width as densely packed bytes: least significant bit first, rows padded to whole bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes 0 .. 2^bits - 1 [N, K] -> uint8 [N, ceil(K * bits / 8)]; 4 bits [4096, 4096] -> [4096, 2048]."""
    rows, columns = codes.shape
    shifts = torch.arange(bits, dtype=torch.int16)
    every = ((codes.to(torch.int16).unsqueeze(2) >> shifts) & 1).reshape(rows, columns * bits)
    every = torch.nn.functional.pad(every, (0, -every.shape[1] % 8)).reshape(rows, -1, 8)
    places = torch.arange(8, dtype=torch.int16)
    return (every << places).sum(dim=2).to(torch.uint8)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """uint8 [N, ceil(K * bits / 8)] -> codes [N, K], uint8."""
    rows = packed.shape[0]
    places = torch.arange(8, dtype=torch.int16)
    every = ((packed.to(torch.int16).unsqueeze(2) >> places) & 1).reshape(rows, -1)[:, : columns * bits]
    shifts = torch.arange(bits, dtype=torch.int16)
    return (every.reshape(rows, columns, bits) << shifts).sum(dim=2).to(torch.uint8)
