"""Bounds of steps: each operation by its bytes and arithmetic, on a target's own figures.

    R = max(bytes / β, operations / π)        of one operation; a step's bound is the sum over its operations

    bytes of a linear        weights with scales and zero points once, input and output of each row
    bytes of an attention    keys and values of every token in the context, once per sequence
    experts                  a step of M rows reaches E (1 − (1 − k/E)^M) of E experts if each row goes to k of them at
                             random

Norms, activations, sampling, the host and communication are left out, so that no runtime is faster than the bound. The
time beyond it is modelled in `efficiency.py`.

Linears as a runtime reads them: their bytes, and the type of their multiplications.

native      the stored form is read: codes, scales, zero points
emulated    the weights are expanded to the target's floats on loading, and read so
inputs too  if the recipe quantizes inputs too and the target computes in that format, products use it; else they use
            the target's floats, in whatever format the weights are stored
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from quantkit.formats import stored_bits
from quantkit.model.sizes.architecture import Architecture, Attention, Matrix
from quantkit.planning import efficiency
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import ComputeType, Stored, Target

Limit = Literal["memory", "compute"]
# name, format, bytes, stored bytes, operations, compute type
_Work = tuple[str, str, float, float, float, ComputeType]
# bytes of an element of the target's own floats, and their format
WIDTH: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
FLOATS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# format of inputs -> compute type of their products
_COMPUTE: Mapping[str, ComputeType] = {
    "int8": "int8",
    "int7": "int8",
    "int4": "int4",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e4m3",
    "mxfp8": "fp8_e4m3",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}
# MatMulNBits quantizes its inputs to 8 bits at this accuracy level
_LEVEL = 4


@dataclass(frozen=True)
class RooflineProduct:
    """A linear as a runtime reads it.

    Args:
        matrix: its shape and count.
        bytes: bytes of one of its `count`, with scales and zero points.
        format: format of the weight.
        compute: type of its multiplications; `fp16` for weights that are expanded on the way.
        width: bytes of an element of input and output.
    """

    matrix: Matrix
    bytes: float
    format: str
    compute: ComputeType
    width: int = 2


@dataclass(frozen=True)
class ModelStep:
    """A step of a model.

    Args:
        batch: number of sequences.
        tokens: new tokens of each sequence: 1 in decoding, the prompt in prefill.
        context: tokens of each sequence that are already in the cache.
    """

    batch: int
    tokens: int = 1
    context: int = 0

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        """`decode` for one new token after others, else `prefill`."""
        return "decode" if self.tokens == 1 and self.context else "prefill"

    @property
    def rows(self) -> int:
        """M of its linears."""
        return self.batch * self.tokens


@dataclass(frozen=True)
class Op:
    """One operation of a step, counted over equal blocks.

    Args:
        name: last word: `q_proj`, `attention`, `lm_head`.
        format: format of its weights, or of the cache for attention.
        times: number of equal operations.
        bytes: bytes that each moves.
        stored: bytes of weights, or of keys and values, without input and output.
        operations: operations of each; a multiply-add counts two.
        compute: type of the multiplications.
        seconds: bound of each; None if the target has no such figure.
        limit: roof that sets the bound.
    """

    name: str
    format: str
    times: int
    bytes: float
    stored: float
    operations: float
    compute: ComputeType
    seconds: float | None
    limit: Limit | None


@dataclass(frozen=True)
class Bound:
    """Operations of a step, and their sum."""

    step: ModelStep
    ops: Sequence[Op]

    @property
    def seconds(self) -> float | None:
        """Sum over the operations; None if one has no bound."""
        if any(op.seconds is None for op in self.ops):
            return None
        return sum((op.seconds or 0.0) * op.times for op in self.ops)

    @property
    def bytes(self) -> float:
        """Bytes moved in all."""
        return sum(op.bytes * op.times for op in self.ops)

    @property
    def operations(self) -> float:
        """Operations in all."""
        return sum(op.operations * op.times for op in self.ops)

    def together(self, target: Target) -> float:
        """Return the bound of the step as one piece, `max(bytes / β, operations / π)`, as for measurements.

        It is never above `seconds`, in which operations do not overlap.
        """
        computing = sum(seconds for _, _, seconds in self._parts(target))
        return max(self.bytes / (target.memory.read_bandwidth.number or float("inf")), computing)

    def shares(self, target: Target) -> dict[str, tuple[float, float]]:
        """Split the step into seconds of (reading, computing) on the target's figures, as measured steps are split."""
        return efficiency.together(self._parts(target))

    def _parts(self, target: Target) -> list[tuple[str, float, float]]:
        read = target.memory.read_bandwidth.number or float("inf")
        return [
            (
                efficiency.ATTENTION
                if op.name.startswith(efficiency.ATTENTION)
                else efficiency.named(op.format, op.compute),
                op.times * op.stored / read,
                op.times * op.operations / (target.compute[op.compute].number or float("inf")),
            )
            for op in self.ops
            if op.compute in target.compute
        ]

    @property
    def calls(self) -> int:
        """Number of operations."""
        return sum(op.times for op in self.ops)

    @property
    def memory_bound(self) -> bool:
        """True if memory sets most of the time."""
        under = sum((op.seconds or 0.0) * op.times for op in self.ops if op.limit == "memory")
        return under >= 0.5 * (self.seconds or 0.0)

    @property
    def missing(self) -> list[str]:
        """Missing figures of the target, without which there is no bound: `compute.fp16`."""
        return sorted({f"compute.{op.compute}" for op in self.ops if op.seconds is None})


@dataclass(frozen=True)
class Cache:
    """Form of keys and values.

    Args:
        format: their format.
        bytes: function from an attention to the bytes of one token in one layer.
    """

    format: str
    bytes: Callable[[Attention], float]


def bound(
    architecture: Architecture,
    products: Mapping[RooflineProduct, int],
    cache: Cache,
    target: Target,
    step: ModelStep,
    *,
    devices: int = 1,
    attention: ComputeType = "fp16",
) -> Bound:
    """Compute the bound of a step.

    Args:
        architecture: source of the attention layers; only linears in `products` count.
        products: all linears that run, including the head, as `alike` counts them.
        target: source of the figures; `auto` figures count as missing.
        devices: devices that share the work evenly; communication is not counted.
        attention: type of attention's multiplications.
    """
    works: Counter[_Work] = Counter()
    head = architecture.head.name.rpartition(".")[2] if architecture.head is not None else None
    for product, times in products.items():
        # logits are needed for the last token of each sequence only
        rows = step.batch if product.matrix.name == head else rows_of(product.matrix, step)
        if rows:
            works[_linear(product, rows, devices)] += times
    both, prefills = architecture.has_encoder, step.phase == "prefill"
    for layer in architecture.layers:
        # beside an encoder, a prompt passes through that one alone
        if layer.attention is not None and not (both and layer.attention.causal == prefills):
            works[_attention(layer.attention, cache, step, devices, attention)] += 1
    ops = [
        Op(name, form, times, moved, stored, work, kind, *_roof(moved, work, kind, target))
        for (name, form, moved, stored, work, kind), times in works.items()
    ]
    return Bound(step, ops)


def rows_of(matrix: Matrix, step: ModelStep) -> int:
    """Return M of a linear in a step: beside an encoder, that of a source's tokens or of an answer's."""
    if not matrix.when:
        return step.rows
    if step.phase == "prefill":  # the first token of the answer follows the prompt
        return step.rows if matrix.when == "prompt" else step.batch
    return step.rows if matrix.when == "step" else 0


def alike(products: Iterable[RooflineProduct]) -> dict[RooflineProduct, int]:
    """Count equal linears of different blocks, by the last word of their name."""
    counts: Counter[RooflineProduct] = Counter()
    for product in products:
        matrix = replace(product.matrix, name=product.matrix.name.rpartition(".")[2])
        counts[replace(product, matrix=matrix)] += 1
    return dict(counts)


def reached(matrix: Matrix, rows: int) -> float:
    """Return the expected number of a linear's `count` that a step of so many rows reads, for even routing."""
    if matrix.count == matrix.active:
        return float(matrix.count)
    return float(matrix.count * (1 - (1 - matrix.active / matrix.count) ** rows))


def looked_at(attention: Attention, step: ModelStep) -> float:
    """Count the (query, key) pairs of one sequence in one layer."""
    tokens, context, window = step.tokens, step.context, attention.window
    if not attention.causal:
        return float(tokens * (tokens + context))
    if window is None or tokens + context <= window:
        return tokens * context + tokens * (tokens + 1) / 2
    # the first queries attend to all earlier tokens, the others to a window
    growing = min(max(0, window - context), tokens)
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window


def kept(attention: Attention, step: ModelStep) -> int:
    """Count the tokens of one sequence whose keys and values a step reads."""
    context = step.context if attention.window is None else min(step.context, attention.window - 1)
    return context + step.tokens


def _linear(product: RooflineProduct, rows: int, devices: int) -> _Work:
    matrix = product.matrix
    through = rows * matrix.active
    stored = reached(matrix, rows) * product.bytes
    moved = stored + through * (matrix.K + matrix.N) * product.width
    work = 2.0 * through * matrix.N * matrix.K
    return matrix.name, product.format, moved / devices, stored / devices, work / devices, product.compute


def _attention(attention: Attention, cache: Cache, step: ModelStep, devices: int, kind: ComputeType) -> _Work:
    if attention.kind == "linear":
        return _recurrence(attention, cache, step, devices, kind)
    if attention.kind == "latent" and step.phase == "decode":
        # queries are projected into the latent space, where one vector serves all heads (arXiv:2405.04434, 2.1)
        features = 2 * (attention.latent or 0) + (attention.rope_dim or 0)
    else:
        features = attention.head_dim + attention.value_dim
    work = 2.0 * step.batch * looked_at(attention, step) * attention.heads * features
    rows = step.rows * attention.heads * (attention.head_dim + attention.value_dim) * WIDTH.get(kind, 2)
    stored = step.batch * kept(attention, step) * cache.bytes(attention)
    name = f"attention, {attention.kind}"
    return name, cache.format, (stored + rows) / devices, stored / devices, work / devices, kind


def _recurrence(attention: Attention, cache: Cache, step: ModelStep, devices: int, kind: ComputeType) -> _Work:
    """Return the work of a layer with a state: it is read and written, and three products a token meet it."""
    work = 6.0 * step.rows * attention.heads * attention.head_dim * attention.value_dim
    stored = 8.0 * step.batch * attention.state
    rows = step.rows * attention.heads * (attention.head_dim + attention.value_dim) * WIDTH.get(kind, 2)
    return "attention, linear", cache.format, (stored + rows) / devices, stored / devices, work / devices, kind


def _roof(moved: float, work: float, kind: ComputeType, target: Target) -> tuple[float | None, Limit | None]:
    read = target.memory.read_bandwidth.number
    rate = target.compute[kind].number if kind in target.compute else None
    if read is None or rate is None:
        return None, None
    reading, computing = moved / read, work / rate
    return max(reading, computing), "memory" if reading >= computing else "compute"


def products(
    architecture: Architecture,
    weights: Mapping[str, WeightScheme],
    activations: Mapping[str, ActivationScheme],
    target: Target,
    runtime: str,
    *,
    accuracy_level: int | None = None,
) -> list[RooflineProduct]:
    """List all running linears, the head last.

    Args:
        weights: name of a quantized linear -> scheme.
        activations: name of a linear with quantized input -> scheme.
        accuracy_level: setting of ONNX Runtime's products with integer weights; None for other runtimes.
    """
    width, base = WIDTH[target.baseline], cast(ComputeType, target.baseline)
    read = []
    for matrix in (*architecture.inside(), *([architecture.head] if architecture.head is not None else [])):
        scheme = weights.get(matrix.name)
        if scheme is None or target.supports(scheme.format, runtime).state != "native":
            dense = float(matrix.N * matrix.K * width)
            read.append(RooflineProduct(matrix, dense, FLOATS[target.baseline], base, width))
            continue
        kind = compute_type(scheme, activations.get(matrix.name), target, runtime, accuracy_level)
        size = stored_bits((matrix.N, matrix.K), scheme) / 8
        read.append(RooflineProduct(matrix, size, scheme.format, kind, width))
    return read


def compute_type(
    weights: WeightScheme | None,
    activations: ActivationScheme | None,
    target: Target,
    runtime: str,
    accuracy_level: int | None = None,
) -> ComputeType:
    """Return the compute type of products with these weights and inputs."""
    base = cast(ComputeType, target.baseline)
    if weights is None:
        return base
    if activations is None:
        integers = weights.format.startswith("int") and accuracy_level == _LEVEL
        return "int8" if integers and "int8" in target.compute else base
    kind = _COMPUTE.get(activations.format, base)
    inputs = Stored(activations.format, activations.symmetric, "inputs")
    return kind if target.use(inputs, runtime).state == "native" and kind in target.compute else base
