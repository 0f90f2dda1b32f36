"""Bytes of a model: as a recipe stores it, and as it runs, on each of the devices that share it.

    weights      bytes of each linear in the runtime, split over the devices; tables likewise; norms on each
    cache        batch · Σ over layers of min(context, window) · bytes of a token's keys and values, or of a state
    activations  rows · width · (2 hidden + the widest of attention and the linears behind it), rows the tokens that run
                 at once: batch · prompt up to `chunk`, batch when decoding. Live at that moment are the residual and
                 its norm, the outputs of the linears that read them, and the input of the last linear; scores of
                 attention are never whole (FlashAttention, arXiv:2205.14135)
    logits       batch · vocabulary · (width + 4 + 4 + 8): the logits, float32 logits, sorted logits, and their order,
                 as top-p sampling needs
    runtime      its libraries, kernels and the CUDA context: published figures, see `RUNTIMES`

Tensor parallelism splits the heads and the inner features (arXiv:1909.08053). If there are fewer heads of keys and
values than devices, they are repeated. A latent cache is the same on every device, and so are the linears that make it.
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

# prompt tokens that servers run at once by default
CHUNK = 8192
# linears that write to the residual; they are split along their inputs
_LAST = ("o_proj", "down_proj", "w2", "fc2", "output.dense", "linear_attn.out_proj")
# linears whose output all heads share
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
_MOST = 1 << 22


def storage(architecture: Architecture, recipe: Recipe, export: str | None = None) -> Storage:
    """Predict the stored weights of a model under a recipe, with the exporter's own sizes.

    Args:
        export: one of the recipe's exports; by default the first.

    Raises:
        InputError: the refusals of a compile: `override-unmatched`, `keep-unmatched`, `group-indivisible`,
            `format-unsupported`, `nothing-to-quantize`, and the exporter's; `export-unknown` for an export that the
            recipe does not have.
    """
    steps = {step.name: step for step in recipe.export}
    chosen = export or next(iter(steps))
    if chosen not in steps:
        raise InputError("export-unknown", where=recipe.name, value=chosen, rule=f"it exports {', '.join(steps)}")
    exporter = load_exporter(chosen)
    if exporter.classes and architecture.class_name and architecture.class_name not in exporter.classes:
        rule = f"`{chosen}` supports {', '.join(exporter.classes)}"
        raise unheld(architecture.name, architecture.class_name, rule, f"leave `{chosen}` out of `export`")
    if architecture.has_encoder and exporter.stacks == 1:
        rule = f"`{chosen}` holds one stack of blocks"
        raise unheld(architecture.name, "an encoder and a decoder", rule, f"leave `{chosen}` out of `export`")
    laid, assigned = _laid_over(architecture, recipe)
    stored = exporter.storage(steps[chosen].settings, laid)
    shared = architecture.tied and assigned.head is None
    return replace(stored, shared=shared, decisions=[*assigned.decisions, *stored.decisions])


def _laid_over(architecture: Architecture, recipe: Recipe) -> tuple[LaidOver, Assigned]:
    """Apply a recipe to a model, and return the storage of each linear."""
    matrices = {matrix.name: matrix for matrix in architecture.inside()}
    names = _names(matrices, recipe)
    head, assigned = architecture.head, assign_sizes(recipe, architecture, names)
    # single experts become one entry per way of storage
    kinds: Counter[tuple[str, WeightScheme | None, ActivationScheme | None]] = Counter()
    for name, matrix in names.items():
        key = (matrix.name, assigned.schemes.get(name), assigned.activations.get(name))
        kinds[key] += matrix.count if name == matrix.name else 1
    linears = []
    for (name, scheme, inputs), count in kinds.items():
        matrix = matrices[name]
        # tokens reach all experts of an entry equally often
        active = max(1, round(matrix.active * count / matrix.count))
        linears.append(StoredLinear(replace(matrix, count=count, active=active), scheme, inputs))
    linears += [StoredLinear(matrix) for matrix in matrices.values() if matrix.router]
    last = StoredLinear(head, assigned.schemes.get(head.name)) if head is not None else None
    moved = any("moved" in pass_of(step).ensures for step in recipe.passes)
    return LaidOver(architecture, linears, last, recipe.scheme.kv_cache, moved), assigned


def _names(matrices: Mapping[str, Matrix], recipe: Recipe) -> dict[str, Matrix]:
    """Map each linear's name in a compile to its entry; experts are separate only where globs could tell them apart."""
    globs = [glob for glob in (*recipe.keep, *(change.match for change in recipe.overrides)) if glob not in ROLES]
    names: dict[str, Matrix] = {}
    for name, matrix in matrices.items():
        if matrix.router:
            continue  # a parameter, not a linear
        before, place, after = name.partition(".*.")
        if globs and place:
            names |= {f"{before}.{number}.{after}": matrix for number in range(matrix.count)}
        else:
            names[name] = matrix
    return names


# --- while it runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes of a device that a runtime takes beside the model.

    Args:
        bytes: bytes on a single device.
        several: bytes on each of several devices that serve together.
        share: share of the device's memory that it uses in all.
        source: source of the figures.
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
# tokens of a step, and of a block of the KV cache on a CPU (vLLM 0.32, engine/arg_utils.py, platforms/cpu.py)
STEP_TOKENS, BLOCK = 2048, 128


def taken_by(runtime: str, kind: str) -> RuntimeMemory:
    """Return the memory of a runtime on a `gpu` or `cpu`; nothing is counted on a CPU, and the source says so."""
    if kind == "cpu":
        return RuntimeMemory(0.0, 0.0, 1.0, "nothing; the program itself takes a few hundred MB more")
    return RUNTIMES.get(runtime, _CONTEXT)


def cache_of(scheme: CacheScheme | None, dtype: str) -> Cache:
    """Describe the storage of keys and values.

    Args:
        scheme: scheme of a recipe; None for unquantized ones.
        dtype: dtype of keys and values, and of the scales of tokens.
    """
    form = scheme.format if scheme is not None else dtype
    element: float = load_format(form).bits / 8
    # fixed scales take no bytes per token; dynamic ones take one per head for keys and one for values
    scale = 0 if scheme is None or not scheme.dynamic else WIDTHS[dtype] + (0 if scheme.symmetric else 1)

    def bytes_of(attention: Attention) -> float:
        if not attention.causal or attention.kind == "linear":
            return 0.0
        if attention.kind == "latent":
            return element * ((attention.latent or 0) + (attention.rope_dim or 0)) + scale
        return attention.kv_heads * (element * (attention.head_dim + attention.value_dim) + 2 * scale)

    return Cache(form, bytes_of)


def kv_blocks(
    architecture: Architecture, cache: Cache, space: float, context: int, size: int = BLOCK
) -> tuple[int, int] | None:
    """Return vLLM's number of blocks of the KV cache, and the requests of `context` tokens that they hold.

        blocks = ⌊space / (size · Σ bytes of a token over the layers of a group)⌋

    Layers that see the same tokens form a group. With several windows, all groups have the same number of layers: the
    fewest of a window, or the most if that is below 1.5 times the fewest. They share the blocks. A window holds its own
    tokens, those of a step, and one block more (vLLM 0.32, v1/core/kv_cache_utils.py).

    Args:
        space: bytes of the cache.
        context: tokens of a request.
        size: tokens of a block.

    Returns:
        None if layers with several windows differ in bytes of a token, which vLLM packs in other ways, without causal
        attention, or with layers that keep a state.
    """
    layers = Counter(layer.attention for layer in architecture.layers if layer.attention and layer.attention.causal)
    windows: Counter[int | None] = Counter()
    for attention, count in layers.items():
        windows[attention.window] += count
    widths = {cache.bytes(attention) for attention in layers}
    if not windows or 0.0 in widths or (len(windows) > 1 and len(widths) > 1):
        return None
    fewest, most = min(windows.values()), max(windows.values())
    group = most if most < 1.5 * fewest else fewest
    page = group * max(widths)
    if len(windows) == 1:
        page = sum(count * cache.bytes(attention) for attention, count in layers.items())
    needed = 0
    for window, count in windows.items():
        tokens = context if window is None else min(window - 1 + STEP_TOKENS, context)
        needed += -(-count // group) * (-(-tokens // size) + (window is not None))
    blocks = int(space // (size * page))
    return blocks, blocks // needed


@dataclass(frozen=True)
class Footprint:
    """Memory of a model in a runtime.

    Args:
        architecture: shapes of the model.
        products: its linears in the runtime, including the head.
        cache: form of keys and values.
        width: bytes of an element of activations, norms and tables.
        shared: True if the head reads the table of tokens.
        runtime: memory of the runtime itself.
        capacity: bytes of a device; None for no limit.
        chunk: prompt tokens that run at once; None for all of them.
        groups: linear -> inputs that share a scale.
        tables: bytes of the tables of tokens and positions in a file; None for elements of `width`.
        others: bytes of other parameters, likewise; None for the norms.
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
    # cache: a search for the largest batch needs the same weights many times
    _known: dict[int, dict[str, float]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def parts(self, batch: int, context: int, *, prompt: int | None = None, devices: int = 1) -> dict[str, float]:
        """Return bytes per device: `weights`, `embeddings`, `others`, `cache`, `activations`, `logits`, `runtime`.

        Args:
            context: tokens of each sequence, prompt and output.
            prompt: tokens of each prompt; by default the whole context.
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
        """Return the bytes of keys and values on each device; 0 for an encoder."""
        total = 0.0
        if self.architecture.kind != "decoder":
            return total
        for attention, count in self._attentions.items():
            if not attention.causal:  # an encoder's
                continue
            tokens = context if attention.window is None else min(context, attention.window)
            share = 1.0 if attention.kind == "latent" else -(-attention.kv_heads // devices) / attention.kv_heads
            total += count * share * (tokens * self.cache.bytes(attention) + 4.0 * attention.state)
        return batch * total

    @property
    def cache_per_token(self) -> float:
        """Bytes of one more token, within all windows."""
        return self.cache_bytes(1, 2) - self.cache_bytes(1, 1)

    def fits(self, batch: int, context: int, *, prompt: int | None = None, devices: int = 1) -> bool:
        """Tell whether all parts fit a device."""
        if self.capacity is None:
            return True
        needed = sum(self.parts(batch, context, prompt=prompt, devices=devices).values())
        return needed <= self.capacity * self.runtime.share

    def largest_batch(self, context: int, *, prompt: int | None = None, devices: int = 1) -> int | None:
        """Return the largest batch with this context that fits; 0 if none does, None without a limit."""
        return self._most(lambda batch: self.fits(batch, context, prompt=prompt, devices=devices))

    def largest_context(self, batch: int, *, devices: int = 1) -> int | None:
        """Return the longest context with this batch that fits, up to the model's own; 0 if none does."""
        limit = self.architecture.max_context
        most = self._most(lambda context: self.fits(batch, context, devices=devices), limit or _MOST)
        return limit if most is None else most

    def needed(self, batch: int, context: int, *, prompt: int | None = None, most: int = 64) -> int | None:
        """Return the smallest number of devices, a power of two, that hold it; None if `most` do not suffice."""
        devices = 1
        while devices <= most:
            if not self.why_not(devices) and self.fits(batch, context, prompt=prompt, devices=devices):
                return devices
            devices *= 2
        return None

    def why_not(self, devices: int) -> str:
        """Return the reason why so many devices cannot share the model; "" if they can."""
        for attention in self._attentions:
            if attention.heads % devices:
                return f"{attention.heads} heads are not shared evenly"
            if attention.kv_heads % devices and devices % attention.kv_heads:
                return f"{attention.kv_heads} heads of keys and values are neither shared nor repeated evenly"
        for product in self.products:
            matrix = product.matrix
            if matrix.router or matrix.name.endswith(_WHOLE) or self._is_head(matrix):
                continue  # the head is split by vocabulary, with padding
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
        """Return the share of a linear on each device."""
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
        """Live features of a token between two writes to the residual."""
        return max((width for layer in self.architecture.layers for width in _inner(layer)), default=0)

    def _most(self, fits: Callable[[int], bool], limit: int = _MOST) -> int | None:
        """Return the largest number with `fits`; None if even `limit` fits."""
        return None if fits(limit) else bisect_left(range(1, limit), True, key=lambda number: not fits(number))


def _inner(layer: BlockShapes) -> tuple[int, int]:
    """Return the live features of a token in attention, and in the linears behind it."""
    widths = {True: 0, False: 0}
    for matrix in layer.matrices:
        inside = matrix.name.removeprefix(layer.name)
        attention = "attn" in inside or "attention" in inside.lower()
        widths[attention] += matrix.active * (matrix.K if matrix.name.endswith(_LAST) else matrix.N)
    return widths[True], widths[False]


def _repeated(matrix: Matrix) -> bool:
    """Tell whether a linear makes only keys or only values."""
    return matrix.name.endswith((".k_proj", ".v_proj", ".key", ".value"))
