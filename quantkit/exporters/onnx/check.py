"""Check that ONNX Runtime computes the expected values from the written graph.

    reload.onnxruntime   max |logits - expected| / max |expected| <= 1e-4 for the runs of `exporters/check.py`. Products
                         compute in float32 (accuracy level 0, inputs not rounded) in spite of the file's settings, so
                         int8 rounding cannot hide a wrong nibble, zero point, mask or position

Two graphs of an encoder and a decoder run a batch of whole answers, the same token by token through both caches, and a
source with padding behind it.

With quantized inputs:

    reload.integers      ||y - b - x̂ Wᵀ|| / ||x̂ Wᵀ|| <= 1e-4 for every product, as the median over its tokens. x̂ is the
                         product's actual input x, rounded by the recipe's scheme (`formats.base.activation`); W is the
                         dequantized weight; b is the bias if the product adds it
    integer.macs         share of the products' multiply-accumulates that run in integer kernels on this machine, by
                         ONNX Runtime's optimized graph (`graph.integer`): at least 0.95, with every product

A few inputs in 100,000 lie so close to the edge between two codes that they round to the other one, in a single token;
the median ignores them. Saturated sums and wrong scales show in all tokens, as 5e-3 and more.

With a second way to multiply many rows (`integers.py`):

    onnx.bytes           largest difference of a weight's bytes from its dequantized codes: half a step of the row
    reload.many          that way with products in float32, against the model with weights in 8 bits a channel: 1e-4
    reload.prompts       that way with its real products (inputs in 8 bits too) on a prompt: ||outputs - expected|| /
                         ||expected|| <= 0.25, which finds broken graphs but no rounding errors
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.exporters.check import all_within, counted, difference, first_line, judged, largest, prompt, reloaded
from quantkit.exporters.onnx.ends import HEAD_ROWS, TABLE, Storage, with_ends
from quantkit.exporters.onnx.integers import BYTES, LINEARS, expandable
from quantkit.exporters.values import Values
from quantkit.formats.base import activation
from quantkit.graph import integer
from quantkit.graph.integer import QuantizedSite
from quantkit.model.streaming.stream import set_tensor
from quantkit.runtimes.onnxruntime.encoder_decoder import ENCODER, OnnxPair
from quantkit.runtimes.onnxruntime.float_products import BIAS, Links, nodes_of, one_way
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.runtimes.onnxruntime.session import MODEL, OnnxModel

Array = NDArray[Any]
LIMIT = 1e-4
DOMAINS = {"", "ai.onnx", "com.microsoft"}
# share of multiply-accumulates in integer kernels
_SHARE = 0.95
# half a step, with the rounding of float32
_HALF = 0.501
_PROMPTS = 0.25
# tokens of a source before its padding
_SHORT = 9


def check(folder: Path, values: Values | None) -> list[Check]:
    """Check `onnx/` of a bundle; outputs only if the file is sound and expected values are available."""
    both = (folder / ENCODER).is_file()
    encoder = sound(folder, ENCODER) if both else []
    checks = [*sound(folder), *(one.model_copy(update={"name": f"{one.name}.encoder"}) for one in encoder)]
    if values is None or not all(check.ok for check in checks):
        return checks
    if both:
        return [*checks, _both(folder, values)]
    values = with_ends(values, *_stored(folder))
    checks.append(
        reloaded("reload.onnxruntime", LIMIT, values, lambda: OnnxModel(folder, threads=_threads(), accuracy_level=0))
    )
    if not checks[-1].ok:
        return checks
    ids = prompt(values)
    return [*checks, *_in_integers(folder, values, ids), *_many_rows(folder, values, ids)]


def _threads() -> int:
    return torch.get_num_threads()


def _stored(folder: Path) -> tuple[Storage, int]:
    """Return the graph's storage of token embeddings, and the number of head rows with more bits."""
    import onnx

    notes = _notes(onnx.load(str(folder / MODEL), load_external_data=False))
    table, rows = notes.get(TABLE, "float"), notes.get(HEAD_ROWS, "0")
    return table if table in get_args(Storage) else "float", int(rows) if rows.isdecimal() else 0  # type: ignore[return-value]


def _notes(holder: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in holder.metadata_props}


# --- the file ---------------------------------------------------------------------------------------------------------


def sound(folder: Path, name: str = MODEL) -> list[Check]:
    """Check `onnx.valid` (by onnx's checker), `onnx.operators` (foreign domains), `onnx.contained` (paths outside)."""
    import onnx

    path = folder / name
    # paths are checked first, because onnx's checker opens the files
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as problem:  # exceptions of protobuf and of the system
        return [counted("onnx.valid", [f"{name} cannot be read: {first_line(problem)}"])]
    outside = sorted({place for place in locations(model) if not _inside(folder, place)})
    contained = counted("onnx.contained", outside)
    foreign = sorted({node.domain for graph in _graphs(model.graph) for node in graph.node} - DOMAINS)
    # functions in the file could replace the runtime's operators
    foreign += sorted(f"{function.domain}::{function.name}" for function in model.functions)
    operators = counted("onnx.operators", foreign)
    if outside:
        return [contained, operators]
    try:
        onnx.checker.check_model(str(path))
        valid = counted("onnx.valid", [])
    except Exception as problem:
        valid = counted("onnx.valid", [first_line(problem)])
    return [valid, operators, contained]


def locations(model: Any) -> list[str]:
    """List the files named by a model's tensors."""
    tensors = (tensor for graph in _graphs(model.graph) for tensor in _tensors(graph))
    return [entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"]


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    sparse = list(graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
            sparse += [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])]
            sparse += attribute.sparse_tensors
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _inside(folder: Path, place: str) -> bool:
    """Return True for a plain file of the folder: no link, no path (CVE-2024-27318, CVE-2026-27489)."""
    path = folder / place
    return Path(place).name == place and path.is_file() and not path.is_symlink()


# --- products in integers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphProduct:
    """One product of a written graph, with the weights of stacked linears.

    Args:
        linears: names of the linears.
        weight: initializer with their codes.
        source, output: values before and after the product.
        biased: True if it adds the linears' biases.
    """

    linears: Sequence[str]
    weight: str
    source: str
    output: str
    biased: bool = False

    @property
    def name(self) -> str:
        """Names of its linears, for messages."""
        return ", ".join(self.linears)


def products(folder: Path) -> list[GraphProduct]:
    """List the integer products of `onnx/`."""
    import onnx

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    one_way(model, "steps")
    links, listed = Links(model.graph), []
    for node in model.graph.node:
        if linears := _notes(node).get(LINEARS):
            *_, last = links.chain(node)
            biased = node.op_type == "MatMulIntegerToFloat" and len(node.input) > BIAS
            product = GraphProduct(linears.split(), links.weight(node), links.source(node), last.output[0], biased)
            listed.append(product)
    return listed


def _in_integers(folder: Path, values: Values, ids: torch.Tensor) -> list[Check]:
    """Make the checks `reload.integers` and `integer.macs`; none if no input is quantized."""
    inputs = values.inputs
    if not inputs:
        return []
    written = products(folder)
    missing = sorted(set(inputs) - {linear for product in written for linear in product.linears})
    shown = list(dict.fromkeys(name for product in written for name in (product.source, product.output)))
    model = OnnxModel(folder, threads=_threads(), shown=shown)
    feeds = model.prompt(ids.numpy())
    wanted = [name for name in shown if name not in feeds]
    seen = dict(zip(wanted, model.session.run(wanted, feeds), strict=True))
    errors = {product.name: _error(product, values, seen) for product in written}
    return [
        all_within("reload.integers", errors, LIMIT, missing, digits=2),
        _kernels(folder, values, written, missing),
    ]


def _error(product: GraphProduct, values: Values, seen: Mapping[str, Array]) -> float:
    """Return the relative error of y, in the median of its tokens."""
    x = torch.from_numpy(seen[product.source]).float()
    how, static = values.inputs[product.linears[0]], None
    if how.scale is not None:
        zero = None if how.scheme.symmetric else torch.tensor(how.zero, dtype=torch.int8)
        static = activation.InputScale(torch.tensor(how.scale), zero)
    rounded = activation.fake_quantize(x, how.scheme, static).double()
    weights = [values.quantized(linear).dense()[:, : x.shape[-1]] for linear in product.linears]
    expected = rounded @ torch.cat(weights).double().T
    biases = [values.tensor(f"{linear}.bias").double() for linear in product.linears if product.biased]
    off = torch.from_numpy(seen[product.output]).double() - expected - (torch.cat(biases) if biases else 0)
    errors = off.norm(dim=-1) / expected.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return float(errors.flatten().median()) if bool(torch.isfinite(errors).all()) else math.inf


def _kernels(folder: Path, values: Values, written: Sequence[GraphProduct], missing: Sequence[str]) -> Check:
    import onnx_ir as ir

    sizes = {name: value.numel() for name, value in values.skeleton.named_parameters(remove_duplicate=False)}

    def macs(linears: Sequence[str]) -> float:
        return float(sum(sizes[f"{linear}.weight"] for linear in linears))

    sites = [QuantizedSite(part.name, part.weight, macs(part.linears), part.output) for part in written]
    sites += [QuantizedSite(name, "", macs([name])) for name in missing]
    with tempfile.TemporaryDirectory(prefix="quantkit-optimized-") as place:
        path = Path(place) / MODEL
        write_optimized(folder / MODEL, path)
        kernels = integer.found(ir.load(path), sites)
    where = "; ".join([f"{name} runs as {kind}" for name, kind in kernels.floating.items()][:3])
    ok = kernels.share >= _SHARE and not kernels.floating
    return Check(name="integer.macs", value=kernels.share, limit=_SHARE, ok=ok, where=where)


# --- many rows --------------------------------------------------------------------------------------------------------


def _many_rows(folder: Path, values: Values, ids: torch.Tensor) -> list[Check]:
    """Make the check `onnx.bytes` and, if it holds, `reload.many` and `reload.prompts`; none with one way."""
    import onnx
    from onnx import numpy_helper
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = nodes_of(model, "prompts")
    if not nodes:
        return []
    stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def read(name: str) -> torch.Tensor:
        copied = onnx.TensorProto()
        copied.CopyFrom(stored[name])  # one weight in memory at a time
        if uses_external_data(copied):
            load_external_data_for_tensor(copied, str(folder))
        return torch.from_numpy(numpy_helper.to_array(copied).copy())

    off: dict[str, float] = {}
    for node in nodes:
        linears = _notes(node).get(LINEARS, "").split()
        if linears and node.input[1].endswith(BYTES):
            codes, step = read(node.input[1]).T, read(node.input[3])[:, None]
            exact = torch.cat([_unpadded(values, linear) for linear in linears])
            off |= dict.fromkeys(linears, float(((codes * step - exact) / step).abs().max()))
    head = values.stream.head
    wanted = {name for name, scheme in values.schemes.items() if name != head and expandable(scheme.format)}
    checks = [all_within("onnx.bytes", off, _HALF, wanted - set(off), digits=3)]
    if not checks[0].ok:
        return checks
    rounded = values.stream.on(values.stream.device, values.stream.place)
    rounded.transforms.append(_Rounded(rounded.block_names, frozenset(wanted), values.linears()))
    own = replace(values, stream=rounded)
    checks.append(
        reloaded(
            "reload.many",
            LIMIT,
            own,
            lambda: OnnxModel(folder, threads=_threads(), accuracy_level=0, way="prompts"),
        )
    )
    expected = rounded.answers(ids).all().float().numpy()
    running = OnnxModel(folder, threads=_threads())
    logits = running.run(running.state(*ids.shape), ids.numpy())
    error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
    return [*checks, judged("reload.prompts", error, _PROMPTS, "")]


@dataclass(frozen=True)
class _Rounded:
    """Rounds weights of linears inside the blocks to 8 bits a row when they load."""

    blocks: Sequence[str]
    linears: frozenset[str]
    turned: Mapping[str, bool]

    def block(self, index: int, block: nn.Module) -> None:
        """Round the weights of a block."""
        prefix = f"{self.blocks[index]}."
        for name in (name for name in self.linears if name.startswith(prefix)):
            parameter = f"{name.removeprefix(prefix)}.weight"
            weight = block.get_parameter(parameter).detach()
            rows = weight.T if self.turned[name] else weight
            step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            own = torch.round(rows / step) * step
            set_tensor(block, parameter, (own.T if self.turned[name] else own).contiguous())

    def rest(self, model: nn.Module) -> None:
        """Leave the rest unchanged."""


def _unpadded(values: Values, linear: str) -> torch.Tensor:
    """Return the values of a linear's codes without padding."""
    shape = values.skeleton.get_parameter(f"{linear}.weight").shape
    return values.quantized(linear).dense()[:, : shape[0] if values.linears()[linear] else shape[1]]


# --- an encoder and a decoder ---------------------------------------------------------------------------------------


def _both(folder: Path, values: Values) -> Check:
    """Make the check `reload.onnxruntime`."""
    try:
        model = OnnxPair(folder, threads=torch.get_num_threads(), accuracy_level=0)
        error, where = largest(_runs(model, values))
    except InputError as problem:
        error, where = None, problem.line()
    return judged("reload.onnxruntime", error, LIMIT, where)


def _runs(model: OnnxPair, values: Values) -> Mapping[str, float]:
    ids = prompt(values)
    tokens, expected = ids.numpy(), values.stream.answers(ids).all().float().numpy()
    runs = {"whole": difference(model.retold(tokens), expected)}
    state, told = model.state(len(tokens), 2 * tokens.shape[1]), tokens.copy()
    told[:, 0] = model.start
    model.read(state, tokens)
    steps = [model.write(state, told[:, [at]]) for at in range(tokens.shape[1])]
    runs["steps"] = difference(np.concatenate(steps, axis=1), expected)
    if model.heard is not None:
        return runs
    mask = np.ones_like(tokens)
    mask[-1, _SHORT:] = 0
    short = values.stream.answers(ids[-1:, :_SHORT]).all().float().numpy()
    runs["padded source"] = difference(model.retold(tokens, mask)[-1:, :_SHORT], short)
    runs["source beside it"] = difference(model.retold(tokens, mask)[:1], expected[:1])
    return runs
