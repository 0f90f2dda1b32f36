"""The least time of a step: each operation by what it must move and compute, on a target's own figures.

    R = max(bytes / β, operations / π)        of one operation; a step's bound is the sum over its operations
    bytes of a linear        weights with scales and zeros once, its input and output for each row
    bytes of an attention    keys and values of every token that is looked at, once for each sequence
    experts                  a step of M rows reaches E (1 − (1 − k/E)^M) of E experts where each row goes to k of them
                             and none is preferred

Norms, activations, sampling, the host and what devices tell each other are not in it, so that no runtime is faster than
the bound. What runtimes take beyond it is `efficiency.py`.

A model's linears as a runtime reads them: which bytes, multiplied in what.

native      the stored form is read: codes, scales, zeros
emulated    the weights are expanded to the target's floats when they are loaded, and read so
inputs too  where the recipe quantizes the inputs as well and the target computes in that format, products are done
            in it; else in the target's floats, whatever the weights are stored in
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from quantkit.formats import stored_bits
from quantkit.model.sizes.architecture import Architecture, Attention, Matrix
from quantkit.planning.bound import steps
from quantkit.scheme import ActivationScheme, WeightScheme
from quantkit.target import ComputeType, Stored, Target

# name, format, bytes, those of them that are stored, operations, what in
_Work = tuple[str, str, float, float, float, ComputeType]


@dataclass(frozen=True)
class RooflineProduct:
    """A linear as a runtime reads it.

    Args:
        bytes: read for one of its `count`, scales and zeros included.
        format: of its weights: `int4`.
        compute: what its multiplications are done in; `fp16` for weights that are expanded on the way.
        width: bytes of an element that goes in or out.
    """

    matrix: Matrix
    bytes: float
    format: str
    compute: ComputeType
    width: int = 2


@dataclass(frozen=True)
class ModelStep:
    """What is asked for at once.

    Args:
        tokens: new ones of each: 1 in decoding, the prompt in prefill.
        context: tokens of each that are in the cache already.
    """

    batch: int
    tokens: int = 1
    context: int = 0

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        """`decode` with one new token after others, else `prefill`."""
        return "decode" if self.tokens == 1 and self.context else "prefill"

    @property
    def rows(self) -> int:
        """M of its linears."""
        return self.batch * self.tokens


@dataclass(frozen=True)
class Op:
    """One operation of a step, with those of other blocks that equal it.

    Args:
        name: its last word: `q_proj`, `attention`, `lm_head`.
        format: of its weights; the cache's for attention.
        bytes: moved by each.
        stored: those of them that are weights, or keys and values: without what goes in and out.
        operations: of each; a multiplication with its addition counts two.
        seconds: the bound of each; None where the target has no such figure.
        limit: which roof it lies under.
    """

    name: str
    format: str
    times: int
    bytes: float
    stored: float
    operations: float
    compute: ComputeType
    seconds: float | None
    limit: Literal["memory", "compute"] | None


@dataclass(frozen=True)
class Bound:
    """A step's operations, and their sum."""

    step: ModelStep
    ops: Sequence[Op]

    @property
    def seconds(self) -> float | None:
        """None as soon as one operation has no bound."""
        found = [op.seconds for op in self.ops]
        if any(each is None for each in found):
            return None
        return sum((op.seconds or 0.0) * op.times for op in self.ops)

    @property
    def bytes(self) -> float:
        """Moved in all."""
        return sum(op.bytes * op.times for op in self.ops)

    @property
    def operations(self) -> float:
        """In all."""
        return sum(op.operations * op.times for op in self.ops)

    def together(self, target: Target) -> float:
        """The bound of the step as one piece, `max(bytes / β, operations / π)`: what measurements are set against.

        Never above `seconds`, in which no operation hides behind another.
        """
        read = target.memory.read_bandwidth.number or float("inf")
        computing = sum(
            op.times * op.operations / (target.compute[op.compute].number or float("inf"))
            for op in self.ops
            if op.compute in target.compute
        )
        return max(self.bytes / read, computing)

    def shares(self, target: Target) -> dict[str, tuple[float, float]]:
        """What of the step is whose, on the target's figures, in the way that measured steps say it."""
        read = target.memory.read_bandwidth.number or float("inf")
        return steps.together(
            (
                steps.ATTENTION if op.name.startswith(steps.ATTENTION) else steps.named(op.format, op.compute),
                op.times * op.stored / read,
                op.times * op.operations / (target.compute[op.compute].number or float("inf")),
            )
            for op in self.ops
            if op.compute in target.compute
        )

    @property
    def memory_bound(self) -> bool:
        """Whether most of its time goes under the roof of the memory."""
        under = sum((op.seconds or 0.0) * op.times for op in self.ops if op.limit == "memory")
        return under >= 0.5 * (self.seconds or 0.0)

    @property
    def missing(self) -> list[str]:
        """The figures that the target lacks: `compute.fp16`."""
        return sorted({f"compute.{op.compute}" for op in self.ops if op.seconds is None})


@dataclass(frozen=True)
class Cache:
    """How keys and values are kept.

    Args:
        format: `float16`, `fp8_e4m3`, …
        bytes: of one token in one layer, by its attention.
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
    """The bound of a step.

    Args:
        architecture: for its attention; linears that are not among `products` are left out.
        products: all linears that run, the head's too, as `alike` counts them.
        target: its figures; `auto` ones count as missing.
        devices: that share the work evenly; nothing is counted for what they tell each other.
        attention: what attention multiplies in.
    """
    found: Counter[_Work] = Counter()
    head = architecture.head.name.rpartition(".")[2] if architecture.head is not None else None
    for product, times in products.items():
        # logits are wanted of the last token of each sequence alone
        rows = step.batch if product.matrix.name == head else step.rows
        found[_linear(product, rows, devices)] += times
    kinds = Counter(layer.attention for layer in architecture.layers if layer.attention is not None)
    for each, times in kinds.items():
        found[_attention(each, cache, step, devices, attention)] += times
    ops = [
        Op(name, form, times, moved, stored, work, kind, *_roof(moved, work, kind, target))
        for (name, form, moved, stored, work, kind), times in found.items()
    ]
    return Bound(step, ops)


def alike(products: Iterable[RooflineProduct]) -> dict[RooflineProduct, int]:
    """Linears that differ in nothing but their block, each with how often it occurs: a hundred blocks have a handful.

    They go by the last word of their name.
    """
    found: Counter[RooflineProduct] = Counter()
    for product in products:
        matrix = replace(product.matrix, name=product.matrix.name.rpartition(".")[2])
        found[replace(product, matrix=matrix)] += 1
    return dict(found)


def reached(matrix: Matrix, rows: int) -> float:
    """How many of a linear's `count` a step of that many rows reads, on average over even routing."""
    if matrix.count == matrix.active:
        return float(matrix.count)
    return float(matrix.count * (1 - (1 - matrix.active / matrix.count) ** rows))


def looked_at(attention: Attention, step: ModelStep) -> float:
    """(query, key) pairs of one sequence in one layer."""
    tokens, context = step.tokens, step.context
    if not attention.causal:
        return float(tokens * (tokens + context))
    window = attention.window
    if window is None or tokens + context <= window:
        return tokens * context + tokens * (tokens + 1) / 2
    # the first queries see all before them, the others a window
    growing = max(0, window - context)
    growing = min(growing, tokens)
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window


def kept(attention: Attention, step: ModelStep) -> int:
    """Tokens of one sequence whose keys and values a step reads."""
    context = step.context if attention.window is None else min(step.context, attention.window - 1)
    return context + step.tokens


def _linear(product: RooflineProduct, rows: int, devices: int) -> _Work:
    matrix = product.matrix
    through = rows * matrix.active
    stored = reached(matrix, rows) * product.bytes
    moved = stored + through * (matrix.K + matrix.N) * product.width
    work = 2.0 * through * matrix.N * matrix.K
    return matrix.name, product.format, moved / devices, stored / devices, work / devices, product.compute


def _attention(each: Attention, cache: Cache, step: ModelStep, devices: int, kind: ComputeType) -> _Work:
    width = WIDTH.get(kind, 2)
    tokens = kept(each, step)
    if each.kind == "latent" and step.phase == "decode":
        # queries are carried into the compressed space, where one vector serves all heads (arXiv:2405.04434, 2.1)
        features = 2 * (each.latent or 0) + (each.rope_dim or 0)
    else:
        features = each.head_dim + each.value_dim
    work = 2.0 * step.batch * looked_at(each, step) * each.heads * features
    rows = step.rows * each.heads * (each.head_dim + each.value_dim) * width
    stored = step.batch * tokens * cache.bytes(each)
    return f"attention, {each.kind}", cache.format, (stored + rows) / devices, stored / devices, work / devices, kind


def _roof(
    moved: float, work: float, kind: ComputeType, target: Target
) -> tuple[float | None, Literal["memory", "compute"] | None]:
    read = target.memory.read_bandwidth.number
    rate = target.compute[kind].number if kind in target.compute else None
    if read is None or rate is None:
        return None, None
    reading, computing = moved / read, work / rate
    return max(reading, computing), "memory" if reading >= computing else "compute"


# bytes of an element of the target's own floats
WIDTH: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
FLOATS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# what products of such inputs are done in
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


def products(
    architecture: Architecture,
    weights: Mapping[str, WeightScheme],
    activations: Mapping[str, ActivationScheme],
    target: Target,
    runtime: str,
    *,
    accuracy_level: int | None = None,
) -> list[RooflineProduct]:
    """All linears that run, the head's last.

    Args:
        weights: name -> how it is stored, of those that are quantized.
        activations: name -> how its input is, of those whose input is.
        accuracy_level: of ONNX Runtime's products with integer weights; None of other runtimes.
    """
    head = [architecture.head] if architecture.head is not None else []
    return [
        _product(each, weights.get(each.name), activations.get(each.name), target, runtime, accuracy_level)
        for each in (*architecture.inside(), *head)
    ]


def compute_type(
    weights: WeightScheme | None,
    activations: ActivationScheme | None,
    target: Target,
    runtime: str,
    accuracy_level: int | None = None,
) -> ComputeType:
    """What products with such weights and inputs are done in."""
    base = cast(ComputeType, target.baseline)
    if weights is None:
        return base
    if activations is None:
        integers = weights.format.startswith("int") and accuracy_level == _LEVEL
        return "int8" if integers and "int8" in target.compute else base
    kind = _COMPUTE.get(activations.format, base)
    inputs = Stored(activations.format, activations.symmetric, "inputs")
    return kind if target.use(inputs, runtime).state == "native" and kind in target.compute else base


def _product(
    matrix: Matrix,
    weights: WeightScheme | None,
    activations: ActivationScheme | None,
    target: Target,
    runtime: str,
    accuracy_level: int | None,
) -> RooflineProduct:
    width = WIDTH[target.baseline]
    dense = float(matrix.N * matrix.K * width)
    floats = FLOATS[target.baseline]
    if weights is None or target.supports(weights.format, runtime).state != "native":
        return RooflineProduct(matrix, dense, floats, cast(ComputeType, target.baseline), width)
    kind = compute_type(weights, activations, target, runtime, accuracy_level)
    return RooflineProduct(matrix, stored_bits((matrix.N, matrix.K), weights) / 8, weights.format, kind, width)
