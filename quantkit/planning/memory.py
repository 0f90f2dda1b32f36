"""Bytes of a model: as a recipe stores it, and as it runs, on each of the devices that share it.

    weights      what the runtime holds of each linear, split over the devices; tables likewise; norms on each
    cache        batch · Σ over layers of min(context, window) · bytes of a token's keys and values
    activations  rows · width · (2 hidden + the widest of attention and the linears behind it), rows the tokens that run
                 at once: batch · prompt up to `chunk`, batch when decoding. Alive at that moment are the residual and
                 its norm, what the linears that read them write, and what the last one reads; scores of attention are
                 never whole (FlashAttention, arXiv:2205.14135)
    logits       batch · vocabulary · (width + 4 + 4 + 8): as they come, in float32, sorted, and their order, which
                 top-p sampling needs
    runtime      its libraries, kernels and the CUDA context: figures that others report, see `RUNTIMES`

Tensor parallelism splits the heads and the inner features (arXiv:1909.08053). Where there are fewer heads of keys and
values than devices they are repeated; a latent cache is the same on every device, and so are the linears that make it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from quantkit.errors import InputError
from quantkit.exporters import load_exporter, unheld
from quantkit.formats import load_format
from quantkit.model.sizes.architecture import Architecture, Attention, BlockShapes, Matrix
from quantkit.model.sizes.storage import WIDTHS, LaidOver, Storage, StoredLinear
from quantkit.passes import pass_of
from quantkit.planning.assigned import ROLES, Assigned, assign_sizes
from quantkit.planning.roofline import Cache, RooflineProduct
from quantkit.recipe import Recipe
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# tokens of prompts that servers run at once, unless they are told otherwise
CHUNK = 8192
# they write to the residual, and are split by what they read
_LAST = ("o_proj", "down_proj", "w2", "fc2", "output.dense")
# they make what all heads share
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
_MOST = 1 << 22


def storage(architecture: Architecture, recipe: Recipe, export: str | None = None) -> Storage:
    """Predict what a recipe makes of a model's weights: it is laid over their sizes, and the exporter counts.

    Args:
        export: one of its exports; the first of them by default.

    Raises:
        InputError: what a compile would refuse: `override-unmatched`, `keep-unmatched`, `group-indivisible`,
            `format-unsupported`, `nothing-to-quantize`, and what the exporter does; `export-unknown`, one that the
            recipe has not.
    """
    steps = {step.name: step for step in recipe.export}
    chosen = export or next(iter(steps))
    if chosen not in steps:
        raise InputError("export-unknown", where=recipe.name, value=chosen, rule=f"it exports {', '.join(steps)}")
    exporter = load_exporter(chosen)
    if exporter.classes and architecture.class_name and architecture.class_name not in exporter.classes:
        rule = f"`{chosen}` is written of {', '.join(exporter.classes)}"
        raise unheld(architecture.name, architecture.class_name, rule, f"leave `{chosen}` out of `export`")
    laid, assigned = _laid_over(architecture, recipe)
    stored = exporter.storage(steps[chosen].settings, laid)
    shared = architecture.tied and assigned.head is None
    return replace(stored, shared=shared, decisions=[*assigned.decisions, *stored.decisions])


def _laid_over(architecture: Architecture, recipe: Recipe) -> tuple[LaidOver, Assigned]:
    """Lay a recipe over a model, and tell which linear is stored how."""
    matrices = {matrix.name: matrix for matrix in architecture.inside()}
    names = _names(matrices, recipe)
    head, assigned = architecture.head, assign_sizes(recipe, architecture, names)
    # experts one by one become an entry for each way in which they are stored
    kinds: Counter[tuple[str, WeightScheme | None, ActivationScheme | None]] = Counter()
    for name, matrix in names.items():
        key = (matrix.name, assigned.schemes.get(name), assigned.activations.get(name))
        kinds[key] += matrix.count if name == matrix.name else 1
    linears = []
    for (name, scheme, inputs), count in kinds.items():
        matrix = matrices[name]
        # tokens go to each of an entry's experts equally often
        active = max(1, round(matrix.active * count / matrix.count))
        linears.append(StoredLinear(replace(matrix, count=count, active=active), scheme, inputs))
    linears += [StoredLinear(matrix) for matrix in matrices.values() if matrix.router]
    last = StoredLinear(head, assigned.schemes.get(head.name)) if head is not None else None
    moved = any("moved" in pass_of(step).ensures for step in recipe.passes)
    return LaidOver(architecture, linears, last, recipe.scheme.kv_cache, moved), assigned


def _names(matrices: Mapping[str, Matrix], recipe: Recipe) -> dict[str, Matrix]:
    """Linear by its name in a compile -> its entry; experts one by one only where globs could tell them apart."""
    globs = [glob for glob in (*recipe.keep, *(change.match for change in recipe.overrides)) if glob not in ROLES]
    names: dict[str, Matrix] = {}
    for name, matrix in matrices.items():
        if matrix.router:
            continue  # a parameter, which no recipe names
        before, place, after = name.partition(".*.")
        if globs and place:
            names |= {f"{before}.{number}.{after}": matrix for number in range(matrix.count)}
        else:
            names[name] = matrix
    return names


# --- while it runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes that a runtime takes of a device besides the model.

    Args:
        bytes: of one that serves alone; `several`: of each that serve together.
        share: of the device's memory that it uses at all.
        source: who says so.
    """

    bytes: float
    several: float
    share: float
    source: str


_CONTEXT = RuntimeMemory(
    0.3e9, 0.6e9, 1.0, "a CUDA context of about 300 MB (pytorch/pytorch#107667); twice that for several"
)
RUNTIMES: Mapping[str, RuntimeMemory] = {
    # Meta-Llama-3-8B on a card of 79.22 GiB: non_torch_memory, and gpu_memory_utilization
    "vllm": RuntimeMemory(1.79 * 2**30, 3.58 * 2**30, 0.9, "1.79 GiB and 90 % of the card (vllm-project/vllm#10511)")
}


def taken_by(runtime: str, kind: str) -> RuntimeMemory:
    """Tell what a runtime takes on a `gpu` or `cpu`; on a CPU nothing is reckoned, and that is said."""
    if kind == "cpu":
        return RuntimeMemory(0.0, 0.0, 1.0, "nothing, though the program itself takes a few hundred MB")
    return RUNTIMES.get(runtime, _CONTEXT)


def cache_of(scheme: CacheScheme | None, dtype: str) -> Cache:
    """Describe how keys and values are kept.

    Args:
        scheme: of a recipe; None: as they come.
        dtype: in which they come, and in which the scales of tokens are kept.
    """
    form = scheme.format if scheme is not None else dtype
    element: float = load_format(form).bits / 8
    # a fixed scale is one for all tokens; one of a token goes with each head's keys, and with its values
    scale = 0 if scheme is None or not scheme.dynamic else WIDTHS[dtype] + (0 if scheme.symmetric else 1)

    def bytes_of(attention: Attention) -> float:
        if not attention.causal:
            return 0.0
        if attention.kind == "latent":
            return element * ((attention.latent or 0) + (attention.rope_dim or 0)) + scale
        return attention.kv_heads * (element * (attention.head_dim + attention.value_dim) + 2 * scale)

    return Cache(form, bytes_of)


@dataclass(frozen=True)
class Footprint:
    """A model as a runtime holds it.

    Args:
        products: its linears as the runtime holds them, the head's too.
        width: bytes of an element of activations, norms and tables.
        shared: whether the head reads the table of tokens.
        capacity: bytes of a device; None: nothing is bounded.
        chunk: tokens of prompts that run at once; None: all of them.
        groups: linear -> inputs that share a scale, of those in groups.
        tables: bytes of the tables of tokens and positions as a file holds them; None: elements of `width`.
        others: bytes of what belongs to no linear and no table, likewise; None: the norms.
    """

    architecture: Architecture
    products: Sequence[RooflineProduct]
    cache: Cache
    width: int
    shared: bool
    runtime: RuntimeMemory
    capacity: float | None
    chunk: int | None = CHUNK
    groups: Mapping[str, int] = field(default_factory=dict)
    tables: float | None = None
    others: float | None = None
    # a search for the largest batch asks for the same weights again and again
    _known: dict[int, dict[str, float]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def parts(self, batch: int, context: int, *, prompt: int | None = None, devices: int = 1) -> dict[str, float]:
        """Count bytes on each device: `weights`, `embeddings`, `others`, `cache`, `activations`, `logits`, `runtime`.

        Args:
            context: tokens of each, prompt and output.
            prompt: those that come in; the whole context by default.
        """
        if devices not in self._known:
            self._known[devices] = self._weights(devices)
        return {
            **self._known[devices],
            "cache": self.cache_bytes(batch, context, devices=devices),
            "activations": self._activations(batch, prompt or context, devices),
            "logits": float(self._logits(batch)),
            "runtime": self.runtime.bytes if devices == 1 else self.runtime.several,
        }

    def cache_bytes(self, batch: int, context: int, *, devices: int = 1) -> float:
        """Count the bytes of keys and values on each device; an encoder keeps none."""
        total = 0.0
        if self.architecture.kind != "decoder":
            return total
        for attention, count in self._attentions.items():
            tokens = context if attention.window is None else min(context, attention.window)
            share = 1.0 if attention.kind == "latent" else -(-attention.kv_heads // devices) / attention.kv_heads
            total += count * tokens * share * self.cache.bytes(attention)
        return batch * total

    @property
    def cache_per_token(self) -> float:
        """Bytes that one more token takes, within all windows."""
        return self.cache_bytes(1, 1)

    def fits(self, batch: int, context: int, *, prompt: int | None = None, devices: int = 1) -> bool:
        """Tell whether all parts have room on a device."""
        if self.capacity is None:
            return True
        needed = sum(self.parts(batch, context, prompt=prompt, devices=devices).values())
        return needed <= self.capacity * self.runtime.share

    def largest_batch(self, context: int, *, prompt: int | None = None, devices: int = 1) -> int | None:
        """Count the sequences of so many tokens that fit; 0 where none does, None where nothing bounds them."""
        return self._most(lambda batch: self.fits(batch, context, prompt=prompt, devices=devices))

    def largest_context(self, batch: int, *, devices: int = 1) -> int | None:
        """Count the tokens of each of so many sequences that fit, as far as the model goes; 0 where none does."""
        limit = self.architecture.max_context
        most = self._most(lambda context: self.fits(batch, context, devices=devices), limit or _MOST)
        return limit if most is None else most

    def needed(self, batch: int, context: int, *, prompt: int | None = None, most: int = 64) -> int | None:
        """Count the fewest devices, a power of two, that hold it; None where as many as `most` do not."""
        devices = 1
        while devices <= most:
            if not self.why_not(devices) and self.fits(batch, context, prompt=prompt, devices=devices):
                return devices
            devices *= 2
        return None

    def why_not(self, devices: int) -> str:
        """Say why so many devices cannot share the model; "" where they can."""
        for attention in self._attentions:
            if attention.heads % devices:
                return f"{attention.heads} heads are not shared evenly"
            if attention.kv_heads % devices and devices % attention.kv_heads:
                return f"{attention.kv_heads} heads of keys and values are neither shared nor repeated evenly"
        for product in self.products:
            matrix = product.matrix
            if matrix.router or matrix.name.endswith(_WHOLE) or self._is_head(matrix):
                continue  # the head is split by vocabulary, filled up where it has to be
            last = matrix.name.endswith(_LAST)
            length, group = (matrix.K, self.groups.get(matrix.name, 1)) if last else (matrix.N, 1)
            if length % devices and not _repeated(matrix):
                return f"{matrix.name}: {length} is not shared evenly"
            if length // devices % group:
                return f"{matrix.name}: a share of {length // devices} is not in groups of {group}"
        return ""

    def _weights(self, devices: int) -> dict[str, float]:
        weights = 0.0
        for product in self.products:
            matrix = product.matrix
            if self.shared and self._is_head(matrix):
                continue
            whole = matrix.count * (product.bytes + self.width * matrix.N * matrix.bias)
            weights += whole * self._share(matrix, devices)
        architecture = self.architecture
        norms = architecture.others + sum(layer.others for layer in architecture.layers)
        tables = self.width * architecture.embeddings if self.tables is None else self.tables
        others = float(self.width * norms) if self.others is None else self.others
        return {"weights": weights, "embeddings": tables / devices, "others": others}

    def _is_head(self, matrix: Matrix) -> bool:
        head = self.architecture.head
        return head is not None and matrix.name == head.name

    def _share(self, matrix: Matrix, devices: int) -> float:
        """Share of a linear that each device holds."""
        if matrix.router or matrix.name.endswith(_WHOLE):
            return 1.0
        if _repeated(matrix):
            heads = next((attention.kv_heads for attention in self._attentions), 1)
            return -(-heads // devices) / heads
        return 1.0 / devices

    def _activations(self, batch: int, prompt: int, devices: int) -> float:
        rows = batch * prompt
        if self.chunk is not None:
            rows = min(rows, max(self.chunk, batch))
        return rows * self.width * (2 * self.architecture.hidden + self._widest / devices)

    def _logits(self, batch: int) -> int:
        head = self.architecture.head
        return 0 if head is None else batch * head.N * (self.width + 16)

    @cached_property
    def _attentions(self) -> Counter[Attention]:
        return Counter(layer.attention for layer in self.architecture.layers if layer.attention is not None)

    @cached_property
    def _widest(self) -> int:
        """Features that are alive between two writes to the residual, of a token."""
        return max((width for layer in self.architecture.layers for width in _inner(layer)), default=0)

    def _most(self, fits: Callable[[int], bool], limit: int = _MOST) -> int | None:
        """The largest number that fits; None where `limit` does."""
        return None if fits(limit) else bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def _inner(layer: BlockShapes) -> tuple[int, int]:
    """What attention, and what the linears behind it have alive of a token: all they write, and what the last reads."""
    widths = {True: 0, False: 0}
    for matrix in layer.matrices:
        inside = matrix.name.removeprefix(layer.name)
        attention = "attn" in inside or "attention" in inside
        widths[attention] += matrix.active * (matrix.K if matrix.name.endswith(_LAST) else matrix.N)
    return widths[True], widths[False]


def _repeated(matrix: Matrix) -> bool:
    """Whether it makes keys or values alone."""
    return matrix.name.endswith((".k_proj", ".v_proj", ".key", ".value"))
