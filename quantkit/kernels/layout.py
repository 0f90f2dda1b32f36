"""Layout of weights for the kernels: every thread loads 16 bytes that hold its own matrix fragment.

A tensor core takes its left operand from registers, 16 rows by 32 bytes at a time. Of such a fragment, lane 4 g + t
holds (PTX ISA, fragments of `mma.m16n8k16` and `mma.m16n8k32`; a warp of `wgmma.m64nNk16` has the same)

    row  g + 8 rl    rl = 0, 1        column  4 H rh + H t + h    rh = 0, 1    h < H elements of one register

with H = 2 for 16-bit operands and 4 for 8-bit ones. A *tile* is 16 rows by P fragments side by side, P = 16 / bits. A
32-bit word (g, t, rh, rl) holds elements h = 0 .. H-1 of all P fragments, so that decoding a word fills P registers,
each in its place. No weight moves between threads, and a warp reads a tile, 512 bytes, with one load.

    format      operand   P   tile      bit of element h of fragment i
    int4        16 bits   4   16 x 64   16 h + 4 i       (a mask and one shift leave fragment i in both halves)
    nf4         16 bits   4   16 x 64   8 i + 4 h        (four codes of 16 bits select four table bytes at once)
    int8, fp8   16 bits   2   16 x 32   16 h + 8 i

Tiles of the same 16 rows follow each other along K: words [4096, 14336] int4 are int32 [256, 224, 128].
Rows and columns are padded with code 0 to whole tiles; the kernels never multiply the padding.

8-bit codes for products with 8-bit inputs (`.native`) are not decoded: a tensor core reads them from shared memory.
They
stay [N, K], in rows, where torch's own products read the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch

    from quantkit.formats import QuantTensor

ROWS = 16
WORDS = 128
# nested scales that share a float32 (`formats.Nested`)
NESTED = 256


@dataclass(frozen=True)
class Words:
    """Layout of one kind of codes in 32-bit words.

    Args:
        bits: bits of a code.
        lanes: H, elements of a fragment in one register; 0 for codes in rows, without words.
        stride: bits from element h to h + 1, and from fragment i to i + 1.
        offset: offset that makes a signed code unsigned.
    """

    bits: int
    lanes: int
    stride: tuple[int, int]
    offset: int

    @property
    def fragments(self) -> int:
        """P, fragments in a tile."""
        return 32 // (self.bits * self.lanes)

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return 8 * self.lanes * self.fragments

    def shifts(self, device: torch.device) -> torch.Tensor:
        """Return the bit position of each element in its word, [P, H] int32."""
        import torch

        at = [[self.stride[0] * h + self.stride[1] * i for h in range(self.lanes)] for i in range(self.fragments)]
        return torch.tensor(at, dtype=torch.int32, device=device)


KINDS = {
    "int4": Words(4, 2, (16, 4), 8),
    "nf4": Words(4, 2, (4, 8), 0),
    "int8": Words(8, 2, (16, 8), 128),
    "fp8_e4m3": Words(8, 2, (16, 8), 0),
    "int8.native": Words(8, 0, (0, 0), 0),
    "fp8_e4m3.native": Words(8, 0, (0, 0), 0),
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the kernels' layout, padded to Np and Tp: whole tiles of 16 rows and `KINDS[kind]` columns.

    Args:
        kind: one of `KINDS`; `.native` for products with 8-bit inputs.
        words: [Np / 16, Tp, 128] int32; for a `.native` kind the codes [N, K], int8 or float8_e4m3fn.
        scale: [G, Np] ([1, N] for a `.native` kind), in its stored dtype; for nested scales their uint8 codes.
        zero: [G, Np] uint8, `zero + offset`; None if symmetric.
        shape: (N, K).
        group: columns that share a scale; K for one scale per row.
        nested: absmax [ceil(N * G / 256)], values of the codes [256], offset [1], all float32; None for plain scales.
        rows_share: rows that share a scale in the source; 0 for all of them (one scale per tensor).
    """

    kind: str
    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    group: int
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    rows_share: int = 1

    @property
    def groups(self) -> int:
        """G, scales along K."""
        return self.scale.shape[0]

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory."""
        parts = [self.words, self.scale, *(() if self.zero is None else (self.zero,)), *(self.nested or ())]
        return sum(part.numel() * part.element_size() for part in parts)

    def to(self, device: str | torch.device) -> PackedWeight:
        """Return a copy on another device."""
        zero = None if self.zero is None else self.zero.to(device)
        nested = self.nested and (self.nested[0].to(device), self.nested[1].to(device), self.nested[2].to(device))
        return replace(self, words=self.words.to(device), scale=self.scale.to(device), zero=zero, nested=nested)


def pack(tensor: QuantTensor, *, native: bool = False) -> PackedWeight:
    """Pack a quantized weight for the kernels, without rounding.

    Args:
        tensor: weight in a format of `KINDS`, without a global scale.
        native: True for products with 8-bit inputs; needs one scale per row.

    Raises:
        InputError: `unknown-kernel`, `group-unsupported`, `kernel-unsupported`.
    """
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    nested, scale, share = None, tensor.scale, 1
    if scheme.granularity == "block":
        share = scheme.group or rows
        scale = scale.repeat_interleave(share, dim=0)[:rows]
    elif scheme.granularity == "tensor":
        share, scale = 0, scale.expand(rows, 1)
    if tensor.nested is not None:
        from quantkit.formats.nf4 import dynamic_values

        at = tensor.scale.device
        nested = (tensor.nested.absmax, dynamic_values().to(at), tensor.nested.offset.reshape(1))
        scale = tensor.nested.codes.reshape(scale.shape)
    group = scheme.group if scheme.granularity in ("group", "block") and scheme.group else columns
    kind = f"{scheme.format}.native" if native else scheme.format
    return pack_parts(kind, tensor.codes, scale, tensor.zero, group=group, nested=nested, rows_share=share)


def pack_parts(
    kind: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    group: int | None = None,
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    rows_share: int = 1,
) -> PackedWeight:
    """Pack plain tensors as `pack` does, without a scheme.

    Args:
        kind: one of `KINDS`.
        codes: [N, K] as in `QuantTensor`: int8, uint8 indices of a codebook, or float8.
        scale: [N, G]; uint8 codes for nested scales.
        zero: [N, G] int8.
        group: columns that share a scale; None for K / G.
        nested: parts of nested scales; see `PackedWeight`.
        rows_share: rows that share a scale; see `PackedWeight`.

    Raises:
        InputError: `unknown-kernel`, `group-unsupported`, `kernel-unsupported`.
    """
    import torch

    if kind not in KINDS:
        raise unknown_name("kernel", kind, KINDS)
    form, (rows, columns) = KINDS[kind], (codes.shape[0], codes.shape[1])
    group = group or columns // scale.shape[1]
    _check(kind, form, scale, zero, columns, group)
    if not form.lanes:
        plain = (codes.contiguous(), scale.T.contiguous(), None)
        return PackedWeight(kind, *plain, (rows, columns), group, None, rows_share)
    unsigned = codes.view(torch.uint8) if codes.is_floating_point() else (codes.to(torch.int16) + form.offset)
    filled = _padded(unsigned.to(torch.int32) & 255, -rows % ROWS, -columns % form.columns)
    half, parts = form.lanes, form.fragments
    # rows 16 R + 8 rl + g, columns (8 H P) T + 8 H i + 4 H rh + H t + h
    view = filled.view(filled.shape[0] // ROWS, 2, 8, -1, parts, 2, 4, half)
    ordered = view.permute(0, 3, 2, 6, 5, 1, 4, 7)  # R, T, g, t, rh, rl, i, h
    words = (ordered << form.shifts(codes.device)).sum(dim=(-2, -1), dtype=torch.int32)
    words = words.reshape(words.shape[0], words.shape[1], WORDS).contiguous()
    if zero is not None:
        zero = _by_group((zero.to(torch.int16) + form.offset).to(torch.uint8), filled.shape[0])
    scales = _by_group(scale, filled.shape[0])
    if words.is_cuda:
        # a decode step reads weights before it waits for the previous kernel (`decode`): that must not be a packing one
        torch.cuda.current_stream(words.device).synchronize()
    return PackedWeight(kind, words, scales, zero, (rows, columns), group, nested, rows_share)


def codes_of(packed: PackedWeight) -> torch.Tensor:
    """Return the codes [N, K] as `QuantTensor` has them; float8 codes as bytes, uint8."""
    import torch

    form, (rows, columns) = KINDS[packed.kind], packed.shape
    if not form.lanes:
        return packed.words.view(torch.uint8) if packed.words.is_floating_point() else packed.words
    tiles = packed.words.view(*packed.words.shape[:2], 8, 4, 2, 2, 1, 1)
    every = (tiles >> form.shifts(packed.words.device)) & (2**form.bits - 1)  # R, T, g, t, rh, rl, i, h
    flat = every.permute(0, 5, 2, 1, 6, 4, 3, 7).reshape(packed.words.shape[0] * ROWS, -1)[:rows, :columns]
    unsigned: torch.Tensor = flat.to(torch.uint8)
    if not packed.kind.startswith("int"):
        return unsigned
    return (unsigned.to(torch.int16) - form.offset).to(torch.int8)


def unpack(packed: PackedWeight, like: QuantTensor) -> QuantTensor:
    """Invert `pack`, bit for bit, for tests and exports.

    Args:
        packed: the packed weight.
        like: source of the parts that the kernels do not need: scheme, codebook, effective values of nested scales.
    """
    import torch

    rows = packed.shape[0]
    codes = codes_of(packed)
    if packed.kind.startswith("fp8"):
        codes = codes.view(torch.float8_e4m3fn)
    scale = packed.scale[:, :rows].T
    nested = like.nested
    if nested is not None and packed.nested is not None:
        nested = replace(nested, codes=scale.reshape(-1), absmax=packed.nested[0], offset=packed.nested[2].reshape(()))
        scale = like.scale
    scale = scale[:1] if packed.rows_share == 0 else scale[:: packed.rows_share]
    zero = None
    if packed.zero is not None:
        zero = (packed.zero[:, :rows].T.to(torch.int16) - KINDS[packed.kind].offset).to(torch.int8).contiguous()
    return like.replace(codes=codes, scale=scale.contiguous(), zero=zero, nested=nested)


def scales_of(packed: PackedWeight) -> torch.Tensor:
    """Return the effective scales [N, G] float32."""
    rows = packed.shape[0]
    scale = packed.scale[:, :rows].T
    if packed.nested is None:
        plain: torch.Tensor = scale.float()
        return plain
    absmax, values, offset = packed.nested
    flat: torch.Tensor = values[scale.reshape(-1).int()] * absmax.repeat_interleave(NESTED)[: scale.numel()] + offset
    return flat.reshape(scale.shape)


def _check(kind: str, form: Words, scale: torch.Tensor, zero: torch.Tensor | None, columns: int, group: int) -> None:
    """Refuse parts without a kernel."""
    if kind.endswith(".native") and (zero is not None or group < columns):
        value = "zero points" if zero is not None else f"group {group} of K {columns}"
        rule = "a product of 8-bit codes has one symmetric scale per row"
        raise InputError("kernel-unsupported", kind, value, rule, "granularity: channel, symmetric: true")
    if zero is not None and form.offset == 0:
        rule, remedy = "only integer formats have zero points", "symmetric: true"
        raise InputError("kernel-unsupported", where=kind, value="zero points", rule=rule, remedy=remedy)
    if scale.shape[1] == 1 and group >= columns:
        return
    fits = group in (32, form.columns) or group % form.columns == 0
    if not fits or -(-columns // group) != scale.shape[1]:
        value = f"group {group}, {scale.shape[1]} scales, K {columns}"
        rule = f"a group is 32, a multiple of {form.columns}, or a whole row"
        raise InputError("group-unsupported", kind, value, rule, "use group 32, 64 or 128, or granularity: channel")


def _by_group(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Transpose [N, G] to [G, rows], padded with zeros."""
    return _padded(values.T, 0, rows - values.shape[0]).contiguous()


def _padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    import torch

    return torch.nn.functional.pad(values, (0, columns, 0, rows))
