"""The file: which tensors it holds, of which types, and what it says besides; one tensor in memory at a time.

The `gguf` package writes everything before the first tensor; then come the tensors, each on a boundary of 32 bytes.
"""

from __future__ import annotations

import math
import tempfile
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
from quantkit.exporters.gguf.architecture import (
    FLOATS,
    ROPE_FACTORS,
    Config,
    LlamaCppClass,
    add_parameters,
    architecture_of,
    rope_factors,
    turned_rows,
    type_of,
)
from quantkit.exporters.gguf.blocks import floats, packed
from quantkit.exporters.gguf.tokenizer import add_tokenizer, left_out, spaced
from quantkit.formats import QuantTensor, joined, load_format
from quantkit.model.device import put
from quantkit.model.sizes.storage import instead, mixed, of_table
from quantkit.model.source import pretrained
from quantkit.model.source.weights import Weights, write_atomic
from quantkit.passes.assign import PIECE, nearest
from quantkit.scheme import MIXTURES, WeightScheme

if TYPE_CHECKING:
    import gguf

    from quantkit.exporters.values import Values

ALIGNMENT = 32
TABLE, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Held(Weights):
    """The decided tensors as a file holds them: the table by its codes, and what has none in the file's floats.

    Args:
        weights: what was decided.
        floats: tensor -> the dtype in which the file has it.
        table: the tensor that token ids are looked up in.
        found: its codes; None where it has none, or where they are a linear's.
    """

    weights: Weights
    floats: Mapping[str, torch.dtype]
    table: str
    found: Callable[[], QuantTensor] | None

    @cached_property
    def codes(self) -> QuantTensor | None:
        """The table's."""
        return None if self.found is None else self.found()

    def read(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of the file, in the basis of the source; float32 where it is not as it was decided."""
        if name == self.table and self.codes is not None:
            found: torch.Tensor = load_format(self.codes.scheme.format).dequantize(self.codes)
            return put(found, device)
        value = self.weights.read(name, device)
        return value.to(self.floats[name]).float() if name in self.floats else value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file.

    Args:
        name: in the file.
        kind: ggml's type.
        shape: of the values.
        produce: its data, uint8 or float, as it is stored.
        source: the parameter that it is made from; "" of what the config says.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    produce: Callable[[], NDArray[Any]]
    source: str = ""

    @property
    def bytes(self) -> int:
        """Of its data."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return int(math.prod(self.shape) // block * size)


class Content:
    """What a file of a model holds.

    Args:
        values: the model.
        high: how what has no codes is stored: a float format of quantkit.
        embedding: the scheme of token embeddings, for which another stands in where they are no whole blocks; None: as
            floats. A tied head's codes are the embeddings'.

    Raises:
        InputError: `layout-unsupported`.
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
        """All of them, as the model lists its parameters."""
        import gguf

        values, head = self.values, self.values.stream.head or ""
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name)
        names = gguf.get_tensor_name_map(arch, self.config["num_hidden_layers"])
        table, tied = self.table, self.tied
        found = []
        for name, parameter in values.skeleton.named_parameters(remove_duplicate=False):
            if tied and name == f"{head}.weight":
                continue
            theirs = names.get_name(key=name, try_suffixes=(".weight", ".bias"))
            if theirs is None:
                raise InputError(
                    "layout-unsupported",
                    where=name,
                    value=f"no tensor of llama.cpp's {self.architecture.name}",
                    rule="every parameter has a name there",
                    remedy="leave `gguf` out of `export`",
                )
            linear = name.removesuffix(".weight")
            linear = head if tied and name == table else linear
            shape = tuple(parameter.shape)
            if linear in values.schemes:
                found.append(self._coded(theirs, linear, shape, name))
            elif name == table and self.embedding is not None:
                kind = type_of(self.embedding, name)
                found.append(StoredTensor(theirs, kind, shape, partial(self._rounded_bytes, name), name))
            else:
                # one dimension, and norms of heads: whatever else the file holds, these are in float32
                kind = "F32" if parameter.dim() < 2 or theirs.endswith("_norm.weight") else self.high
                found.append(StoredTensor(theirs, kind, shape, partial(self._float, name, kind), name))
        factors = rope_factors(self.config)
        if factors is not None:
            found.append(StoredTensor(ROPE_FACTORS, "F32", tuple(factors.shape), factors.numpy))
        return found

    @cached_property
    def table(self) -> str:
        """The parameter that token ids are looked up in."""
        return table_of(self.values)

    def decisions(self) -> list[Decision]:
        """What is stored otherwise than asked."""
        found = [] if self.coded_head else list(self._taken)
        if self.spaced:
            reason = "llama.cpp puts a space before each text, this tokenizer before none that begins with one"
            found.append(decision("gguf", "tokens-differ", "tokenizer.json", reason))
        rows = int(self.values.skeleton.get_parameter(self.table).shape[0])
        if gone := left_out(self.values.source, rows):
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            reason = f"the table of embeddings has {rows} rows; llama.cpp's converter leaves out what is beyond them"
            names = f"{', '.join(gone[:3])}{more}"
            found.append(decision("gguf", "tokens-beyond", "tokenizer.json", reason, names, "left out"))
        return found

    @cached_property
    def spaced(self) -> bool:
        """Whether llama.cpp's tokens of some texts have a space more: `tokenizer.spaced`."""
        return spaced(self.values.source)

    @property
    def coded_head(self) -> bool:
        """Whether the table's codes are those of a head that the recipe quantizes."""
        return self.tied and self.values.stream.head in self.values.schemes

    @cached_property
    def tied(self) -> bool:
        """Whether head and table are one parameter."""
        head, skeleton = self.values.stream.head, self.values.skeleton
        return head is not None and skeleton.get_parameter(f"{head}.weight") is skeleton.get_parameter(self.table)

    def order(self, name: str, rows: int) -> torch.Tensor | None:
        """The order in which the file has a parameter's rows; None: as they are."""
        return turned_rows(name, rows, self.architecture, self.config)

    def _coded(self, theirs: str, linear: str, shape: tuple[int, ...], name: str) -> StoredTensor:
        kind = type_of(self.values.schemes[linear], linear)

        def produce() -> NDArray[Any]:
            tensor = self.values.quantized(linear)
            order = self.order(linear, shape[0])
            return packed(tensor if order is None else turned(tensor, order), linear)[1]

        return StoredTensor(theirs, kind, shape, produce, name)

    @cached_property
    def held(self) -> Values:
        """The model with the values that the file holds.

        Others than those that its codes stand for: the table is looked up by codes too, and floats are the file's.
        """
        stream = self.values.stream
        table, head = stream.files[self.table], f"{stream.head}.weight"
        found: Callable[[], QuantTensor] | None = None
        weights, files = stream.source.weights, dict(stream.files)
        if self.coded_head:
            files[self.table] = files[head]
        elif self.embedding is not None:
            found = partial(self._rounded, self.table)
        dtypes = {theirs: getattr(torch, ours) for ours, theirs in FLOATS.items()}
        kinds = {files[each.source]: dtypes[each.kind] for each in self.tensors if each.source and each.kind in dtypes}
        of_file = Held(weights.entries, weights.folder, weights.shards, weights, kinds, table, found)
        changed = stream.on(stream.device, stream.place)
        changed.source, changed.files = replace(stream.source, weights=of_file), files
        return replace(self.values, stream=changed)

    def _rounded(self, name: str) -> QuantTensor:
        """The table rounded to nearest, a piece of its rows at a time."""
        assert self.embedding is not None
        weight = self.values.tensor(name)
        rows = max(1, PIECE // weight.shape[1])
        return joined([nearest(piece.float(), self.embedding) for piece in weight.split(rows)])

    def _rounded_bytes(self, name: str) -> NDArray[Any]:
        return packed(self._rounded(name), name)[1]

    def _float(self, name: str, kind: str) -> NDArray[Any]:
        value = self._laid(name, self.values)
        found = floats(value, kind)
        if kind == "F16" and bool((value.abs() > torch.finfo(torch.float16).max).any()):
            raise InputError(
                "float16-overflow",
                where=name,
                value=f"up to {float(value.abs().max()):.3g}",
                rule=f"float16 ends at {torch.finfo(torch.float16).max:.0f}",
                remedy="--set 'export=[{gguf: {floats: bfloat16}}]'",
            )
        return found

    def _laid(self, name: str, values: Values) -> torch.Tensor:
        """A parameter as it lies in the file, float32."""
        value = values.tensor(name).float()
        if self.architecture.adds_one and name.endswith("norm.weight"):
            value = value + 1
        order = self.order(name, len(value))
        return value if order is None else value[order]

    def decided(self, stored: StoredTensor) -> torch.Tensor:
        """What a tensor of the file stands for, float32."""
        return self._laid(stored.source, self.held) if stored.source else torch.from_numpy(stored.produce())

    def head_writer(self) -> gguf.GGUFWriter:
        """The package's writer, told of everything but the tensors' data.

        Raises:
            InputError: `gguf-tokenizer`, `tokenizer-missing`, `tokenizer-damaged`.
        """
        import gguf

        source = self.values.source
        writer = gguf.GGUFWriter(None, self.architecture.name)
        for each in self.tensors:
            kind = gguf.GGMLQuantizationType[each.kind]
            writer.add_tensor_info(each.name, each.shape, torch.empty(0).numpy().dtype, each.bytes, raw_dtype=kind)
        total, shared, expert, experts = writer.get_total_parameter_count()
        with tempfile.TemporaryDirectory() as place:
            # the package reads what a folder's name says of the model
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
        rows = next(each.shape[0] for each in self.tensors if each.name == TABLE)
        add_tokenizer(writer, source, rows)
        return writer

    def write(self, path: Path) -> str:
        """Write the file; its sha256.

        Raises:
            InputError: as `head_writer`, `float16-overflow`, `scale-inexact`. Stopped: `disk-full`.
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
            for each in self.tensors:
                data = each.produce()
                if data.nbytes != each.bytes:
                    raise ValueError(f"{each.name}: {data.nbytes} bytes of {each.bytes}")
                yield memoryview(data.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                yield bytes(-data.nbytes % ALIGNMENT)

        return write_atomic(path, chunks())


def table_of(values: Values) -> str:
    """The parameter that token ids are looked up in."""
    skeleton: Any = values.skeleton
    module = skeleton.get_input_embeddings()
    return next(f"{path}.weight" for path, each in skeleton.named_modules() if each is module)


def turned(tensor: QuantTensor, order: torch.Tensor) -> QuantTensor:
    """The same matrix with its rows in another order."""

    def rows(value: torch.Tensor | None) -> torch.Tensor | None:
        return value if value is None or len(value) == 1 else value[order]

    stored = tensor.super_blocks
    if stored is not None:
        parts = {name: rows(getattr(stored, name)) for name in ("d", "sc", "dmin", "mn")}
        stored = replace(stored, **parts)  # type: ignore[arg-type]
    parts = {name: rows(getattr(tensor, name)) for name in ("codes", "scale", "zero", "offset")}
    return tensor.replace(**parts, super_blocks=stored)


def file_type(tensors: Sequence[StoredTensor], head: str) -> int:
    """What llama.cpp calls a file: the mixture whose types its matrices have, whatever stands in for which.

    Of others by the type of most weights; of K types, `M` where others are mixed in.

    Args:
        head: the linear; its tensor is the table where they are tied.
    """
    import gguf

    matrices = [each for each in tensors if len(each.shape) > 1 and each.source]
    ends = [each for each in matrices if each.name in (TABLE, HEAD)]
    named = {each.source.removesuffix(".weight"): each for each in matrices if each not in ends}
    last = next((each for each in ends if each.name == HEAD), ends[0])
    if last.kind not in FLOATS.values():
        named[head] = last
    shapes = {name: (each.shape[0], each.shape[1]) for name, each in named.items()}
    for mixture in MIXTURES:
        wanted = mixed(mixture, shapes, head)
        if all(type_of(instead(how, shapes[name][1])) == named[name].kind for name, how in wanted.items()):
            return int(gguf.LlamaFileType[f"MOSTLY_{mixture.upper()}"])
    counts: dict[str, int] = {}
    for each in matrices:
        if each not in ends:
            counts[each.kind] = counts.get(each.kind, 0) + math.prod(each.shape)
    most = max(counts, key=lambda kind: counts[kind])
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE", "Q2_K": "MOSTLY_Q2_K", "Q6_K": "MOSTLY_Q6_K"}
    size = "M" if len(counts) > 1 else "S"
    name = names.get(most, f"MOSTLY_{most}" + (f"_{size}" if most.endswith("_K") else ""))
    return int(gguf.LlamaFileType[name])
