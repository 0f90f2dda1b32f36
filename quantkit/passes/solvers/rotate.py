"""Orthogonal matrices for turning a residual stream: randomised Hadamard matrices, or others where none is known.

With `Q Qᵀ = 1`, a linear that reads `x Q` instead of `x` computes the same with `W Q`, and one with weight `Qᵀ W`
writes `y Q` instead of `y`. A Hadamard matrix has entries ±1/√n, so that every turned channel is a mean of all channels
with random signs: no channel is an outlier any more, and neither is any column of a weight.

    n = 2^a            Sylvester: H(2n) = [[H, H], [H, -H]]
    n = q + 1          Paley I,  q a prime, q = 3 mod 4:  1 + S,  S = [[0, 1ᵀ], [-1, J]]
    n = 2 (q + 1)      Paley II, q a prime, q = 1 mod 4:  C x [[1, 1], [1, -1]] + 1 x [[1, -1], [-1, -1]],
                                                          C = [[0, 1ᵀ], [1, J]]
    J[i, j] = (i - j | q), the Legendre symbol: 1 for squares, -1 for others, 0 for 0
    n = m k            Kronecker product of both

576 = 12 x 12 x 4, 2304 = 12 x 12 x 16, 3584 = 28 x 128. A product is applied factor by factor, so turning 4096 channels
takes 128 products a channel and not 4096, and nothing of size n² is stored. (Ashkboos et al., "QuaRot: Outlier-Free
4-Bit Inference in Rotated LLMs", 2024, arXiv 2404.00456; Paley, "On Orthogonal Matrices", 1933.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.model.device import one_thread

# a power of two is split into factors up to this size: small dense products beat a butterfly of additions
_DENSE = 64
# elements in one piece of work, in float64
_PIECE = 1 << 22


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrix `Q` [n, n], as `diag(signs) (F₁ ⊗ F₂ ⊗ ...) (1 - 2 u uᵀ)`.

    Args:
        signs: [n] float64, each 1 or -1.
        factors: orthogonal matrices, float64; the product of their sizes is n.
        mirror: u [n] float64 of length 1, or None. It makes `Q 1 = 1`, so that means over channels are kept and
            LayerNorm, which subtracts the mean, commutes with Q as RMSNorm does with every Q.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]
    mirror: Tensor | None = None

    @property
    def size(self) -> int:
        """Size n."""
        return self.signs.numel()

    def apply(self, rows: Tensor, gain: Tensor | None = None) -> Tensor:
        """Multiply `rows` [..., n] by `gain` [n], if any, and by Q; in float64, returned in the dtype of `rows`."""
        flat = rows.reshape(-1, self.size)
        if rows.device != self.signs.device:
            return self.on(rows.device).apply(rows, gain)
        before = self.signs if gain is None else self.signs * gain
        turned = torch.empty_like(flat, memory_format=torch.contiguous_format)
        for start in range(0, flat.shape[0], max(1, _PIECE // self.size)):
            piece = slice(start, start + max(1, _PIECE // self.size))
            turned[piece] = self._turned(flat[piece].double() * before)
        return turned.reshape(rows.shape)

    def on(self, device: torch.device) -> Rotation:
        """Copy the rotation to a device."""
        mirror = None if self.mirror is None else self.mirror.to(device)
        return Rotation(self.signs.to(device), tuple(factor.to(device) for factor in self.factors), mirror)

    def _turned(self, rows: Tensor) -> Tensor:
        """Apply everything after the signs."""
        turned = rows
        for factor in self.factors:
            # the first remaining axis becomes the last; after all factors, the order is restored
            turned = turned.reshape(rows.shape[0], factor.shape[0], -1).transpose(1, 2) @ factor
        turned = turned.reshape(rows.shape)
        if self.mirror is not None:
            turned = turned - 2 * (turned @ self.mirror).unsqueeze(1) * self.mirror
        return turned

    def keeping_means(self) -> Rotation:
        """Return this rotation followed by the reflection for `Q 1 = 1`."""
        ones = torch.ones(1, self.size, dtype=torch.float64)
        # Q 1 = D F (R 1) is 1 if R takes 1 to Fᵀ D 1, which is the row of ones, turned
        gap = (ones - Rotation(self.signs, self.factors).apply(ones))[0]
        length = float(gap.norm())
        return Rotation(self.signs, self.factors, gap / length if length > 1e-9 else None)


def hadamard_rotation(size: int, seed: int) -> Rotation:
    """Return a Hadamard matrix of this order with random signs.

    If none is known, the factors are that of the largest power of two in it, and a random orthogonal one
    (`is_hadamard`).
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    orders = hadamard_orders(size)
    if orders is not None:
        return Rotation(signs, tuple(hadamard(order) / order**0.5 for order in orders))
    power = size & -size
    factors = [hadamard(order) / order**0.5 for order in hadamard_orders(power) or ()]
    return Rotation(signs, (*factors, _random(size // power, generator)))


def random_rotation(size: int, seed: int) -> Rotation:
    """Return a random orthogonal matrix, uniform over all of them: dense, n² numbers."""
    generator = torch.Generator().manual_seed(seed)
    return Rotation(torch.ones(size, dtype=torch.float64), (_random(size, generator),))


def is_hadamard(size: int) -> bool:
    """Tell whether a Hadamard matrix of this order can be constructed here."""
    return hadamard_orders(size) is not None


def _random(size: int, generator: torch.Generator) -> Tensor:
    with one_thread():
        square, triangle = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        # signs of the diagonal: without them the distribution is not uniform (Mezzadri, 2007)
        square_root: Tensor = square * triangle.diagonal().sign()
    return square_root.contiguous()


@cache
def hadamard_orders(size: int) -> tuple[int, ...] | None:
    """Return factors of `size`, each a power of two up to 64 or one of Paley's; None if there are none.

    hadamard_orders(576) == (12, 12, 4), hadamard_orders(4096) == (64, 64), hadamard_orders(100) is None
    """
    if size & (size - 1) == 0:
        return (size,) if size <= _DENSE else (_DENSE, *(hadamard_orders(size // _DENSE) or ()))
    for order in range(12, size + 1, 4):
        if size % order == 0 and order & (order - 1) and _paley(order) is not None:
            rest = () if order == size else hadamard_orders(size // order)
            if rest is not None:
                return (order, *rest)
    return None


@cache
def hadamard(order: int) -> Tensor:
    """Return a Hadamard matrix, float64 of 1 and -1: `H Hᵀ = order`, one of `hadamard_orders`; else ValueError."""
    if order & (order - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < order:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
        return matrix
    construction = _paley(order)
    if construction is None:
        raise ValueError(f"no Hadamard matrix of order {order} is constructed here")
    prime, kind = construction
    squares = {i * i % prime for i in range(1, prime)}
    legendre = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, prime))], dtype=torch.float64)
    at = torch.arange(prime)
    core = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    core[0, 0] = 0.0
    core[1:, 1:] = legendre[(at.unsqueeze(1) - at) % prime]
    one = torch.eye(prime + 1, dtype=torch.float64)
    if kind == 1:
        core[1:, 0] = -1.0
        return one + core
    both = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(core, both) + torch.kron(one, other)


def _paley(order: int) -> tuple[int, int] | None:
    """Return the prime and the kind (1 or 2) of a construction of that order."""
    if order % 4 == 0 and _is_prime(order - 1):
        return order - 1, 1
    half = order // 2 - 1
    if order % 4 == 0 and half % 4 == 1 and _is_prime(half):
        return half, 2
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, int(number**0.5) + 1))
