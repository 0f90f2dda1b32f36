"""AWQ checkpoints packed and unpacked as AutoAWQ 0.2.9 does: `modules/linear/gemm.py`, `utils/packing_utils.py`.

Eight 4-bit codes lie in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 of their columns. A reader unpacks them as they
lie, then moves the columns by the inverse order: `(codes - zeros) * scales`, [in, out], in the dtype of the scales.
"""

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """[R, N] of 0 to 15 -> int32 [R, N / 8]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
    for column in range(words.shape[1]):
        for place, which in enumerate(ORDER):
            words[:, column] |= codes[:, 8 * column + which].to(torch.int32) << 4 * place
    return words


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> [R, N] of 0 to 15."""
    shifts = torch.arange(0, 32, 4)
    lying = (words[:, :, None] >> shifts[None, None, :]).to(torch.int8).reshape(words.shape[0], -1)
    columns = torch.arange(lying.shape[-1]).view(-1, 8)[:, INVERSE].reshape(-1)
    return torch.bitwise_and(lying[:, columns], 15)


def weight(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The weight as its readers have it, [in, out]."""
    zeros = unpacked(qzeros).repeat_interleave(group, dim=0)
    return (unpacked(qweight) - zeros) * scales.repeat_interleave(group, dim=0)
