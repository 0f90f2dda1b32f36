"""Write the file: its tensors with their types, and its fields; one tensor in memory at a time.

The `gguf` package writes everything before the first tensor; then come the tensors, each on a boundary of 32 bytes.

Codes as the bytes of ggml's blocks (`ggml-common.h`, `block_q4_0` and so on).

    32 weights     [d] [m] [high bits] codes         q4_0 q4_1 q5_0 q5_1 q8_0 iq4_nl, and mxfp4 with a power of two
    256 weights    scales, codes, high bits, d, dmin   q2_k to q6_k, iq4_xs, each in its own order
    256 weights    d, numbers of points, signs, scales   iq3_s, iq3_xxs, iq2_s

A nibble holds weight j below weight j + 16 in blocks of 32, and weight l below weight l + 32 of every 64 in those of
256. Codes are stored minus the lowest one. `gguf.quants.dequantize` reads all of it back, and is the test.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit import limits
from quantkit.bundle import Decision, decision
from quantkit.errors import InputError
from quantkit.exporters import unheld
from quantkit.exporters.gguf.architecture import (
    BLOCK,
    FLOATS,
    ROPE_FACTORS,
    Config,
    LlamaCppClass,
    add_parameters,
    architecture_of,
    grouped,
    names_of,
    overflow,
    rope_factors,
    turned_rows,
    type_of,
)
from quantkit.exporters.gguf.tokenizer import add_tokenizer, left_out, spaced
from quantkit.formats import QuantTensor, joined, load_format
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.model.device import put
from quantkit.model.sizes.storage import instead, mixed, of_table
from quantkit.model.source import pretrained
from quantkit.model.source.weights import Weights, write_atomic
from quantkit.passes.assign import PIECE, nearest
from quantkit.scheme import MIXTURES, WeightScheme

if TYPE_CHECKING:
    import gguf
    from torch import Tensor

    from quantkit.exporters.values import Values
    from quantkit.formats import QuantTensor


ALIGNMENT = 32
# ends of names of matrices in float32: norms of heads, routers
_IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight")
TABLE, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Held(Weights):
    """Expected tensors as the file holds them: the embedding by its codes, other float tensors in its types.

    `floats` maps a tensor to its dtype in the file; `round_table` makes the embedding's codes, if no linear has them.
    """

    weights: Weights
    floats: Mapping[str, torch.dtype]
    table: str
    round_table: Callable[[], QuantTensor] | None

    @cached_property
    def codes(self) -> QuantTensor | None:
        """Codes of the embedding."""
        return None if self.round_table is None else self.round_table()

    def read(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Read a tensor of the file, in the basis of the source; float32 if the file changes it."""
        if name == self.table and self.codes is not None:
            return put(self.codes.dense(), device)
        value = self.weights.read(name, device)
        return value.to(self.floats[name]).float() if name in self.floats else value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: ggml's type, the shape of its values, and a function for its data.

    `source` is its parameter; "" for one from the config. `members` are its parameters: those of experts are several.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    produce: Callable[[], NDArray[Any]]
    source: str = ""
    members: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of its data."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return int(math.prod(self.shape) // block * size)


class Content:
    """Content of a model's file.

    Args:
        high: storage of tensors without codes: a float format of quantkit.
        embedding: scheme of token embeddings, replaced if rows are not whole blocks; None: floats. A tied head shares
            them.

    Raises InputError: `layout-unsupported`.
    """

    def __init__(self, values: Values, high: str, embedding: WeightScheme | None) -> None:
        self.values = values
        self.embedding: WeightScheme | None = None
        self._taken: list[Decision] = []
        if embedding is not None:
            columns = int(values.skeleton.get_parameter(self.table).shape[1])
            self.embedding, self._taken = of_table(embedding, columns, high, self.table)
        self.high = FLOATS[high]
        source = values.source
        config = pretrained.config(source.path, trust=source.trust_remote_code)
        self.config: Config = {**config.to_dict(), **({"tie_word_embeddings": False} if source.untied else {})}
        self.architecture: LlamaCppClass = architecture_of(source.architecture, self.config, source.ref)

    @cached_property
    def tensors(self) -> Sequence[StoredTensor]:
        """Tensors of the file, in the order of the model's parameters."""
        values, head = self.values, self.values.stream.head or ""
        parameters = dict(values.skeleton.named_parameters(remove_duplicate=False))
        if self.tied:
            del parameters[f"{head}.weight"]
        stored, groups = [], grouped(parameters)
        for name, theirs in names_of(parameters, self.architecture, self.config).items():
            members = tuple(groups[name])
            first = members[0]
            experts = first != name
            shape = (*([len(members)] if experts else []), *parameters[first].shape)
            linear = head if self.tied and name == self.table else first.removesuffix(".weight")
            produce: Callable[[], NDArray[Any]]
            if linear in values.schemes:
                kind, linears = (
                    type_of(values.schemes[linear], linear),
                    [one.removesuffix(".weight") for one in members],
                )
                produce = partial(self._coded_experts, linears) if experts else partial(self._coded, linear)
            elif name == self.table and self.embedding is not None:
                kind, produce = type_of(self.embedding, name), partial(self._rounded_bytes, name)
            else:
                # vectors, norms of heads and routers are always float32
                kind = "F32" if len(shape) < 2 or theirs.endswith(_IN_FLOAT32) else self.high
                produce = partial(self._float_experts, members, kind) if experts else partial(self._float, name, kind)
            stored.append(StoredTensor(theirs, kind, shape, produce, name, members))
        factors = rope_factors(self.config)
        if factors is not None:
            stored.append(StoredTensor(ROPE_FACTORS, "F32", tuple(factors.shape), factors.numpy))
        return stored

    @cached_property
    def table(self) -> str:
        """Parameter of the token embeddings."""
        skeleton: Any = self.values.skeleton
        table = skeleton.get_input_embeddings()
        return next(f"{path}.weight" for path, module in skeleton.named_modules() if module is table)

    def decisions(self) -> list[Decision]:
        """List the deviations from the request."""
        taken = [] if self.coded_head else list(self._taken)
        if self.spaced:
            reason = "llama.cpp puts a space before each text, this tokenizer before none that begins with one"
            taken.append(decision("gguf", "tokens-differ", "tokenizer.json", reason))
        rows = int(self.values.skeleton.get_parameter(self.table).shape[0])
        if gone := left_out(self.values.source, rows):
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            reason = f"the table of embeddings has {rows} rows; llama.cpp's converter leaves out what is beyond them"
            names = f"{', '.join(gone[:3])}{more}"
            taken.append(decision("gguf", "tokens-beyond", "tokenizer.json", reason, names, "left out"))
        return taken

    @cached_property
    def spaced(self) -> bool:
        """True if llama.cpp's tokens of some texts have an extra space: `tokenizer.spaced`."""
        return spaced(self.values.source)

    @property
    def coded_head(self) -> bool:
        """True if the embedding's codes are those of a head that the recipe quantizes."""
        return self.tied and self.values.stream.head in self.values.schemes

    @cached_property
    def tied(self) -> bool:
        """True if head and embedding are one parameter."""
        head, skeleton = self.values.stream.head, self.values.skeleton
        return head is not None and skeleton.get_parameter(f"{head}.weight") is skeleton.get_parameter(self.table)

    @cached_property
    def held(self) -> Values:
        """Model with the values of the file.

        They differ from those of the codes: the embedding is looked up by codes too, and floats have the file's type.
        """
        stream = self.values.stream
        table, head = stream.files[self.table], f"{stream.head}.weight"
        round_table: Callable[[], QuantTensor] | None = None
        weights, files = stream.source.weights, dict(stream.files)
        if self.coded_head:
            files[self.table] = files[head]
        elif self.embedding is not None:
            round_table = partial(self._rounded, self.table)
        dtypes = {theirs: getattr(torch, ours) for ours, theirs in FLOATS.items()}
        kinds = {
            files[member]: dtypes[one.kind] for one in self.tensors if one.kind in dtypes for member in one.members
        }
        of_file = Held(weights.entries, weights.folder, weights.shards, weights, kinds, table, round_table)
        changed = stream.on(stream.device, stream.place)
        changed.source, changed.files = replace(stream.source, weights=of_file), files
        return replace(self.values, stream=changed)

    def _order(self, name: str, rows: int) -> torch.Tensor | None:
        """Return the order of a parameter's rows in the file; None: unchanged."""
        return turned_rows(name, rows, self.architecture, self.config)

    def _coded(self, linear: str) -> NDArray[Any]:
        tensor = self.values.quantized(linear)
        order = self._order(linear, tensor.shape[0])
        return packed(tensor if order is None else _turned(tensor, order), linear)[1]

    def _coded_experts(self, linears: Sequence[str]) -> NDArray[Any]:
        return np.stack([self._coded(linear) for linear in linears])

    def _float_experts(self, names: Sequence[str], kind: str) -> NDArray[Any]:
        return np.stack([self._float(name, kind) for name in names])

    def _rounded(self, name: str) -> QuantTensor:
        """Round the embedding to nearest, some rows at a time."""
        assert self.embedding is not None
        weight = self.values.tensor(name)
        rows = max(1, PIECE // weight.shape[1])
        return joined([nearest(piece.float(), self.embedding) for piece in weight.split(rows)])

    def _rounded_bytes(self, name: str) -> NDArray[Any]:
        return packed(self._rounded(name), name)[1]

    def _float(self, name: str, kind: str) -> NDArray[Any]:
        value = self._laid(name, self.values)
        most = torch.finfo(torch.float16).max
        if kind == "F16" and bool((value.abs() > most).any()):
            raise overflow(name, float(value.abs().max()), f"float16 ends at {most:.0f}")
        return floats(value, kind)

    def _laid(self, name: str, values: Values) -> torch.Tensor:
        """Return a parameter as the file has it, float32."""
        value = values.tensor(name).float()
        if self.architecture.adds_one and name.endswith("norm.weight"):
            value = value + 1
        order = self._order(name, len(value))
        return value if order is None else value[order]

    def decided(self, stored: StoredTensor) -> torch.Tensor:
        """Return the expected values of a tensor, float32."""
        if not stored.source:
            return torch.from_numpy(stored.produce())
        values = [self._laid(member, self.held) for member in stored.members]
        return values[0] if stored.members == (stored.source,) else torch.stack(values)

    def head_writer(self) -> gguf.GGUFWriter:
        """Return the package's writer with everything except the tensors' data.

        Raises InputError: `gguf-tokenizer`, `tokenizer-missing`, `tokenizer-damaged`.
        """
        import gguf

        source = self.values.source
        writer = gguf.GGUFWriter(None, self.architecture.name)
        for tensor in self.tensors:
            kind = gguf.GGMLQuantizationType[tensor.kind]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=kind)
        total, shared, expert, experts = writer.get_total_parameter_count()
        with tempfile.TemporaryDirectory() as place:
            # the package would guess fields from the folder's name
            folder = Path(place, source.name)
            folder.symlink_to(source.path.resolve(), target_is_directory=True)
            metadata = gguf.Metadata.load(None, folder, source.name, total)
        if metadata.size_label is None:
            metadata.size_label = gguf.size_label(total, shared, expert, experts)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
        add_parameters(writer, self.architecture, self.config)
        writer.add_file_type(file_type(self.tensors, self.values.stream.head or ""))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_tokenizer(writer, source, next(one.shape[0] for one in self.tensors if one.name == TABLE))
        return writer

    def write(self, path: Path) -> str:
        """Write the file and return its sha256.

        Raises InputError: those of `head_writer`, `float16-overflow`, `scale-inexact`. Stopped: `disk-full`.
        """
        with tempfile.TemporaryDirectory() as place:
            head = Path(place, "head")
            writer = self.head_writer()
            writer.write_header_to_file(head)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            begins = limits.read(head, limits.DATA)

        def chunks() -> Iterator[bytes | memoryview]:
            yield begins + bytes(-len(begins) % ALIGNMENT)
            for tensor in self.tensors:
                data = tensor.produce()
                if data.nbytes != tensor.bytes:
                    raise ValueError(f"{tensor.name}: {data.nbytes} bytes of {tensor.bytes}")
                yield memoryview(data.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                yield bytes(-data.nbytes % ALIGNMENT)

        return write_atomic(path, chunks())


def _turned(tensor: QuantTensor, order: torch.Tensor) -> QuantTensor:
    """Reorder the rows of a matrix."""

    def rows(holder: object, *names: str) -> dict[str, Any]:
        parts = {name: getattr(holder, name) for name in names}
        return {name: part if part is None or len(part) == 1 else part[order] for name, part in parts.items()}

    stored = tensor.super_blocks
    if stored is not None:
        stored = replace(stored, **rows(stored, "d", "sc", "dmin", "mn"))
    return tensor.replace(**rows(tensor, "codes", "scale", "zero", "offset"), super_blocks=stored)


def file_type(tensors: Sequence[StoredTensor], head: str) -> int:
    """Name a file's mixture as llama.cpp does, from the types of its matrices.

    Files of no mixture have the type of most weights; K types get `M` if others are mixed in.

    Args:
        head: the head's linear; its tensor is the embedding if they are tied.
    """
    import gguf

    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1 and tensor.source]
    ends = [tensor for tensor in matrices if tensor.name in (TABLE, HEAD)]
    inner = [tensor for tensor in matrices if tensor not in ends]
    named = {tensor.source.removesuffix(".weight"): tensor for tensor in inner}
    last = next((tensor for tensor in ends if tensor.name == HEAD), ends[0])
    if last.kind not in FLOATS.values():
        named[head] = last
    shapes = {name: (tensor.shape[-2], tensor.shape[-1]) for name, tensor in named.items()}
    for mixture in MIXTURES:
        wanted = mixed(mixture, shapes, head)
        if all(type_of(instead(how, shapes[name][1])) == named[name].kind for name, how in wanted.items()):
            return int(gguf.LlamaFileType[f"MOSTLY_{mixture.upper()}"])
    counts: Counter[str] = Counter()
    for tensor in inner:
        counts[tensor.kind] += math.prod(tensor.shape)
    ((most, _),) = counts.most_common(1)
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE", "Q2_K": "MOSTLY_Q2_K", "Q6_K": "MOSTLY_Q6_K"}
    size = "M" if len(counts) > 1 else "S"
    name = names.get(most, f"MOSTLY_{most}" + (f"_{size}" if most.endswith("_K") else ""))
    return int(gguf.LlamaFileType[name])


Bytes = NDArray[Any]  # uint8
_SUPER = 256


@dataclass(frozen=True)
class Parts:
    """A quantized matrix [N, K], a block a row: the parts that a layout assembles."""

    codes: Bytes  # [B, 32] or [B, 256], starting at 0
    # d, m: [B, 1] float16: scale, and minimum or its negative; m is None without one
    d: NDArray[Any]
    m: NDArray[Any] | None = None
    # sc, mn: [B, groups of a super-block] integers; None in plain blocks
    sc: NDArray[Any] | None = None
    mn: NDArray[Any] | None = None


def packed(tensor: QuantTensor, where: str = "") -> tuple[str, Bytes]:
    """Lay out a quantized matrix as the rows of a file: its type, and uint8 [N, bytes of a row].

    Raises InputError: `layout-unsupported`, `scale-inexact` where a float16 does not hold a scale or a minimum.
    """
    kind = type_of(tensor.scheme, where)
    return kind, _LAYOUTS[kind](_parts(tensor, where)).reshape(tensor.shape[0], -1)


def floats(values: Tensor, kind: str) -> NDArray[Any]:
    """Return values [...] in a file's type: float32, float16, or bfloat16's bytes."""
    if kind == "BF16":
        return np.asarray(values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return np.asarray(values.to(torch.float16 if kind == "F16" else torch.float32).contiguous().numpy())


def _parts(tensor: QuantTensor, where: str) -> Parts:
    codes, stored = tensor.codes, tensor.super_blocks
    lowest = _LOWEST.get(tensor.scheme.format, 0)
    numbers = (codes.to(torch.int16) - lowest).to(torch.uint8).numpy()
    if tensor.scheme.format == "int8" and bool((numbers == 0).any()):
        rule = "llama.cpp's kernels take the magnitude of a code as a signed byte"
        raise unheld(where, "codes of -128", rule, "--set scheme.weights.format=q8_0, which has none")
    if stored is not None:
        cut = numbers.reshape(-1, _SUPER)
        d, m, sc, mn = (
            None if part is None else part.numpy().reshape(len(cut), -1)
            for part in (stored.d, stored.dmin, stored.sc, stored.mn)
        )
        assert d is not None
        return Parts(cut, d, m, sc, mn)
    cut = numbers.reshape(-1, BLOCK)
    if tensor.scheme.scale == "e8m0":
        zeros = cut & 7 == 0  # ggml's own files have the zero without a sign
        return Parts(np.where(zeros, 0, cut), tensor.scale.view(torch.uint8).numpy().reshape(-1, 1))
    offset = tensor.offset
    if tensor.zero is not None:  # (code - zero) s = s (code - lowest) + (lowest - zero) s
        offset = (lowest - tensor.zero.float()) * tensor.scale.float()
    return Parts(cut, _float16(tensor.scale, where), None if offset is None else _float16(offset, where))


def _float16(values: Tensor, where: str) -> NDArray[Any]:
    short = values.to(torch.float16)
    if not torch.equal(short.float(), values.float()):
        rule = "a GGUF file holds float16 scales, and some are out of its range"
        remedy = "--set scheme.weights.scale=float16, of a source in float32 or float16"
        raise InputError("scale-inexact", where, f"scales in {str(values.dtype).removeprefix('torch.')}", rule, remedy)
    return short.numpy().reshape(-1, 1)  # type: ignore[no-any-return]


# our code for a file's code 0; other formats begin at 0
_LOWEST = {"int4": -8, "int8": -128, "q4_0": -8, "q5_0": -16, "q8_0": -128, "q3_k": -4, "q6_k": -32}


def _nibbles(codes: Bytes, half: int = 16) -> Bytes:
    """Pack [B, K] into K / 2 bytes: of every 2 * half codes, the first half in the low nibbles."""
    low, high = np.moveaxis(codes.reshape(len(codes), -1, 2, half), 2, 0)
    return np.asarray(low & 15 | (high & 15) << 4).reshape(len(codes), -1)


def _planes(codes: Bytes, bits: int, run: int = 32) -> Bytes:
    """Pack [B, K] of a few bits: a byte holds the same position of 8 / bits runs, the first run lowest."""
    several = codes.reshape(len(codes), -1, 8 // bits, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return np.asarray(np.bitwise_or.reduce(several << shifts, axis=2)).reshape(len(codes), -1)


def _together(*parts: NDArray[Any] | None) -> Bytes:
    """Concatenate the bytes of every block's parts."""
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts if part is not None], axis=1)


def _block4(parts: Parts) -> Bytes:
    return _together(parts.d, parts.m, _nibbles(parts.codes))


def _block5(parts: Parts) -> Bytes:
    high = np.packbits(parts.codes >> 4, axis=1, bitorder="little")
    return _together(parts.d, parts.m, high, _nibbles(parts.codes))


def _block8(parts: Parts) -> Bytes:
    return _together(parts.d, parts.m, parts.codes ^ 128)  # two's complement


def _q2_k(parts: Parts) -> Bytes:
    assert parts.sc is not None and parts.mn is not None
    scales = (parts.sc | parts.mn << 4).astype(np.uint8)
    return _together(scales, _planes(parts.codes, 2), parts.d, parts.m)


def _q3_k(parts: Parts) -> Bytes:
    assert parts.sc is not None
    sc = (parts.sc.astype(np.int16) + 32).astype(np.uint8)
    scales = [_nibbles(sc, 8), _planes(sc >> 4, 2, 4)]
    return _together(_planes(parts.codes >> 2, 1), _planes(parts.codes & 3, 2), *scales, parts.d)


def _scales_of_6_bits(parts: Parts) -> Bytes:
    """Pack d, dmin, and in 12 bytes eight scales and eight minimums (`get_scale_min_k4`)."""
    assert parts.sc is not None and parts.mn is not None
    sc, mn = parts.sc.astype(np.uint8), parts.mn.astype(np.uint8)
    first = [numbers[:, :4] | (numbers[:, 4:] >> 4) << 6 for numbers in (sc, mn)]
    return _together(parts.d, parts.m, *first, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4)


def _q4_k(parts: Parts) -> Bytes:
    return _together(_scales_of_6_bits(parts), _nibbles(parts.codes, 32))


def _q5_k(parts: Parts) -> Bytes:
    return _together(_scales_of_6_bits(parts), _planes(parts.codes >> 4, 1), _nibbles(parts.codes, 32))


def _q6_k(parts: Parts) -> Bytes:
    assert parts.sc is not None
    # nibbles pair weights 64 apart, high bits 32 apart
    return _together(_nibbles(parts.codes, 64), _planes(parts.codes >> 4, 2), parts.sc.astype(np.int8), parts.d)


def _iq4_xs(parts: Parts) -> Bytes:
    assert parts.sc is not None
    sc = parts.sc.astype(np.uint16) + 32 & 63
    high = np.bitwise_or.reduce((sc >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1, keepdims=True)
    return _together(parts.d, high.astype("<u2"), _nibbles(sc.astype(np.uint8), 1), _nibbles(parts.codes))


def _points(parts: Parts, kind: str) -> tuple[NDArray[Any], Bytes, Bytes]:
    """Return the numbers of the points, a byte of signs for 8 weights, and the numbers of the scales."""
    form = load_format(kind)
    assert isinstance(form, LatticeFormat) and parts.sc is not None
    numbers, negative = (part.numpy() for part in form.points_of(torch.from_numpy(parts.codes)))
    return numbers, np.packbits(negative, axis=1, bitorder="little"), parts.sc.astype(np.uint8) >> 1


def _iq3_s(parts: Parts) -> Bytes:
    numbers, signs, sc = _points(parts, "iq3_s")
    high = np.packbits(numbers >> 8, axis=1, bitorder="little")
    return _together(parts.d, numbers.astype(np.uint8), high, signs, _nibbles(sc, 1))


def _iq3_xxs(parts: Parts) -> Bytes:
    numbers, signs, sc = _points(parts, "iq3_xxs")
    # the eighth sign follows from seven
    sevens = (signs & 127).astype(np.uint32).reshape(len(sc), -1, 4) << np.arange(0, 28, 7, dtype=np.uint32)
    words = np.bitwise_or.reduce(sevens, axis=2) | sc.astype(np.uint32) << 28
    return _together(parts.d, numbers.astype(np.uint8), words.astype("<u4"))


def _iq2_s(parts: Parts) -> Bytes:
    numbers, signs, sc = _points(parts, "iq2_s")
    high = _planes((numbers >> 8).astype(np.uint8), 2, 1)
    return _together(parts.d, numbers.astype(np.uint8), signs, high, _nibbles(sc, 1))


_LAYOUTS: dict[str, Callable[[Parts], Bytes]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "IQ4_NL", "MXFP4"), _block4),
    **dict.fromkeys(("Q5_0", "Q5_1"), _block5),
    "Q8_0": _block8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_S": _iq2_s,
}
