"""Check that another library loads the checkpoint with the expected values.

    max |loaded - expected| / max |expected| <= 1e-4

holds for the logits on one batch, both sides by the same class of plain transformers in the model's dtype: `loaded`
from the folder, `expected` from dense tensors computed from the codes. (If the library multiplies in its own kernels,
norms and a wider limit are used: `transforms.rounding`.) Missing, unexpected and mismatched keys fail as well. The same
limit holds for every packed linear, expanded by its library's own code: that takes one tensor at a time, so it covers a
model of any size, while logits are compared on its first blocks. For a model that cannot be cut to its first blocks and
does not fit into memory, the other tensors are compared instead (`reload.tensors`). If the library is not installed,
transformers cannot load the checkpoint: our own reader of the stored files expands it, and all other tensors are
compared as well (`reload.own_reader`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle, Check
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters.check import judged
from quantkit.exporters.checkpoint.writer import loading_dtype
from quantkit.formats import load_format
from quantkit.formats.base.layout import against, split
from quantkit.machine import in_order
from quantkit.model import layouts, run_time
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.model.layouts import Layout
from quantkit.model.run_time import RunTime
from quantkit.model.source import converted, pretrained
from quantkit.model.source.open import in_float32, model_class_of, open_written
from quantkit.model.source.places import quiet_loading
from quantkit.model.source.weights import Weights, strict_json
from quantkit.model.structure.kinds import cut_config, positions
from quantkit.model.structure.names import match_names, merging_rules, named, same, unread_experts
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

    from quantkit.model.source.open import Source
    from quantkit.model.streaming.own_forward import Answering

LIMIT = 1e-4
# logits of the whole model are compared if its dense weights take at most this, and at most a quarter of the memory
# that the process may use; else those of its first blocks
WHOLE_BYTES = 640 * 2**20
FEW = 2
# a model that cannot be cut is compared as a whole if this share of the free memory holds the loaded model, the
# expected one and its tensors
_COPIES, _SHARE = 3, 0.75
# largest number of tensors compared at once, and the copies of each in memory
_AT_ONCE, _COMPARED = 16, 8
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
# check in the place of the logits
APART = "reload.tensors"


@dataclass(frozen=True)
class Expected:
    """Model that a loader should end up with."""

    names: Sequence[str]  # names of the dense model's tensors in the files
    read: Callable[[str], torch.Tensor]  # name -> value
    layout: Layout | None  # layout of the packed linears; None: there are none
    packed: Mapping[str, WeightScheme]  # prefix of a packed linear in the files -> scheme
    leftover: Collection[str] = ()  # tensors in the files that the class does not use
    run_time: RunTime = field(default_factory=RunTime)  # quantization of inputs and cache at run time
    # device to expand and compare packed linears on, and name -> value there; None: the processor
    there: tuple[torch.device, Callable[[str], torch.Tensor]] | None = None
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)  # one of `names` -> its parts in the files
    unread: bool = False  # whether transformers would not load all of it
    outside: Collection[str] = ()  # tensors in the files that belong to no block of the text, whatever their numbers

    @property
    def stored(self) -> list[str]:
        """`names`, with parts in the place of those that the files have in parts."""
        return [part for name in self.names for part in self.joined.get(name, (name,))]

    def holds(self, name: str, blocks: int | None) -> bool:
        """Tell whether a model of the first blocks has a tensor."""
        return blocks is None or name in self.outside or block_of(name) < blocks


def check(
    folder: Path,
    wanted: Expected,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    blocks: int | None = None,
    beside: Answering | None = None,
) -> list[Check]:
    """Check a checkpoint; a check runs only if the earlier ones hold. `beside` as for `reload`."""
    weights = _opened(folder, wanted.layout)
    checks: list[Check] = []
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in weights.entries.items()}
    if wanted.layout is not None:
        # some layouts read all codes to find a shape, so it is read once
        shapes = {prefix: wanted.layout.shape(prefix, weights.read) for prefix in wanted.packed}
        # tensors of the dense model, in float32
        parts = {prefix + part for prefix in shapes for part in wanted.layout.parts}
        sizes = {name: size for name, size in sizes.items() if name not in parts}
        sizes |= {f"{prefix}.weight": 4 * math.prod(shape) for prefix, shape in shapes.items()}
        checks += _stored(weights, wanted.layout, wanted.packed, shapes)
        if all(check.ok for check in checks):
            checks.append(_expanded(folder, weights, wanted.layout, wanted, sizes))
    if wanted.unread and all(check.ok for check in checks):
        return [*checks, _tensors(folder, weights, wanted, sizes)]
    loadable = wanted.layout is None or not layouts.missing(wanted.layout)
    if loadable and all(check.ok for check in checks):
        if blocks is None:
            blocks = None if sum(sizes.values()) <= min(WHOLE_BYTES, machine.memory_limit() // 4) else FEW
        if blocks is not None and not open_written(folder).can_be_cut(blocks):
            blocks = None
            if _COPIES * sum(sizes.values()) > machine.memory_available() * _SHARE:
                return [*checks, _tensors(folder, weights, wanted, sizes)]
        checks.append(reload(folder, wanted, inputs=inputs, blocks=blocks, beside=beside))
    return checks


def _opened(folder: Path, layout: Layout | None) -> Weights:
    """Open the files; a layer's experts that a layout holds in one tensor are seen one by one."""
    weights = Weights.open(folder)
    if layout is None or not layout.stacks:
        return weights
    return converted.unstacked(weights, open_written(folder).skeleton(), layout.parts)


def _tensors(folder: Path, weights: Weights, wanted: Expected, sizes: Mapping[str, int]) -> Check:
    """Make the check `reload.tensors`: all tensors that are not packed; the packed ones were compared before."""
    packed = {f"{prefix}.weight" for prefix in wanted.packed}
    plain = [name for name in wanted.stored if name not in packed]
    missing = [name for name in plain if name not in weights.entries]
    if missing:
        return _judge(APART, None, f"missing {missing[0]}")
    return _compared(APART, folder, _fitting(plain, sizes), weights.read, wanted.read)


def check_bundle(
    path: Path, *, inputs: Mapping[str, torch.Tensor] | None = None, blocks: int | None = None
) -> list[Check]:
    """Check a finished bundle, by its own manifest."""
    from quantkit.model.structure import experts
    from quantkit.runtimes.torch.reloaded import expanded

    bundle = Bundle.load(path)
    folder = bundle.model_folder
    if not (folder / "config.json").is_file():
        return []
    weights = Weights.open(folder)
    schemes = {layer.name: WeightScheme.model_validate(layer.scheme) for layer in bundle.manifest.layers}
    config = config_json(folder)
    dtype = loading_dtype(config, bundle.manifest.model.source.dtype)
    quantization = config.get("quantization_config")
    how = run_time.read(quantization, schemes, weights.entries, weights.read)
    plain = [name for name in weights.entries if not name.endswith(run_time.PARTS)]
    if quantization is None or run_time.weights_are_dense(quantization):
        apart = outside(open_written(folder)) if "vision_config" in config else ()
        wanted = Expected(plain, weights.read, None, {}, plain, how, outside=apart)
        return check(folder, wanted, inputs=inputs, blocks=blocks)
    layout = layouts.of(quantization)
    weights = _opened(folder, layout)
    plain = [name for name in weights.entries if not name.endswith(run_time.PARTS)]
    # the manifest has the class's names; files may have others, which the class renames on loading
    dense = expanded(open_written(folder))
    skeleton = dense.skeleton()
    files = match_names(dense.weights, skeleton)
    stored = {files.get(f"{name}.weight", name).removesuffix(".weight"): scheme for name, scheme in schemes.items()}
    packed = {prefix: _scheme_of(prefix, stored) for prefix in layout.prefixes(weights.entries)}
    parts = {prefix + part for prefix in packed for part in layout.parts}

    def expected(name: str) -> torch.Tensor:
        prefix = name.removesuffix(".weight")
        if name != prefix and prefix in packed:
            return layout.as_loaded(layout.read_back(prefix, packed[prefix], weights.read), dtype, quantization)
        return weights.read(name)

    # other tensors may be unused ones of the source
    plain = [name for name in plain if name not in parts]
    stored_names = [*plain, *(f"{prefix}.weight" for prefix in packed)]
    joined = experts.joined(skeleton, stored_names)
    inside, wholes = {part for parts in joined.values() for part in parts}, experts.wholes(skeleton)

    def whole(name: str) -> torch.Tensor:
        if name not in joined:
            return expected(name)
        merged, path, leaf = wholes[name]
        return merged.whole(leaf, lambda part: expected(f"{path}.{part}"))

    names = [*(name for name in stored_names if name not in inside), *joined]
    unread = bool(unread_experts(skeleton, layout, named(files, packed), quantization))
    beside = outside(dense, files) if "vision_config" in config else ()
    wanted = Expected(names, whole, layout, packed, plain, how, None, joined, unread, beside)
    return check(folder, wanted, inputs=inputs, blocks=blocks)


def outside(source: Source, files: Mapping[str, str] | None = None) -> set[str]:
    """Name the tensors outside the blocks of the text, in the files and in the class: a tower's are numbered too."""
    from quantkit.model.structure.traced import find_stacks, is_inside

    skeleton = source.skeleton()
    files = match_names(source.weights, skeleton) if files is None else files
    blocks = find_stacks(skeleton)
    return {one for pair in files.items() if not is_inside(pair[0], blocks) for one in pair}


def reload(
    folder: Path,
    wanted: Expected,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    blocks: int | None = None,
    beside: Answering | None = None,
) -> Check:
    """Make the check `reload.transformers`: logits of the `from_pretrained` model against the expected model's.

    Both are loaded in the checkpoint's dtype and run in float32: some classes keep modules in float32, which
    transformers respects for a dense model and not for a packed one.

    Args:
        inputs: keyword arguments of the forward; a fixed batch of ids by default.
        blocks: number of first layers to compare, to bound the memory; None is all.
        beside: answers to keep of the loaded model.
    """
    from quantkit.model.streaming import transforms

    name, cached = "reload.transformers", wanted.run_time.cache is not None
    with quiet_loading():
        own = class_of(folder)
        forgets = run_time.expands_at_load(folder)
        try:
            leftover = [*wanted.leftover, *(run_time.PARTS if forgets else ())]
            model, problem = loaded(own, folder, blocks, leftover, wanted.outside)
            if problem:
                return _judge(name, None, problem)
            dtype = model.dtype
            inputs = inputs or batch(in_float32(model))
            values = logits(in_float32(model), inputs, cached=cached)
            classes = {path: type(module) for path, module in model.named_modules()}
            if beside is not None:
                beside.keep(model)
            del model
        except QuantkitError:
            raise
        except Exception as trouble:  # a wrong file can raise anything in another library
            if is_out_of_memory(trouble):
                raise out_of_memory(folder.name, trouble) from trouble
            return _judge(name, None, f"{type(trouble).__name__}: {' '.join(str(trouble).split())[:200]}")
        state = {tensor: wanted.read(tensor) for tensor in wanted.names if wanted.holds(tensor, blocks)}
        options = {"state_dict": state, "dtype": dtype, "output_loading_info": True}
        reference, info = pretrained.network(own, None, config=config_of(folder, blocks, dense=True), **options)
        del state, options
        in_float32(reference)
        if info["missing_keys"]:
            return _judge(name, None, f"missing {sorted(info['missing_keys'])[0]}")
        if not forgets:
            _quantize_at_run_time(reference, wanted.run_time)
        expected = logits(reference, inputs, cached=cached)
        off, limit = _difference(values, expected), LIMIT
        if wanted.layout is not None and wanted.layout.kernels:
            replaced = [path for path, module in reference.named_modules() if type(module) is not classes[path]]
            rounded = logits(transforms.rounding(reference, replaced), inputs, cached=cached)
            off = transforms.departure(values, expected)
            limit += transforms.DEPARTURES * transforms.departure(rounded, expected)
    del reference
    machine.let_go()
    return _judge(name, off, "logits", limit)


def _quantize_at_run_time(model: Any, how: RunTime) -> None:
    """Quantize a model's inputs and cache at run time, as compressed-tensors does."""
    from quantkit.model.structure.experts import split_loaded
    from quantkit.model.structure.traced import blocks_of, find_stacks, names_of

    if how.activations:  # those of merged experts belong to linears
        split_loaded(model, merging_rules(model))
    paths = find_stacks(model)
    for transform in how.transforms(names_of(model, paths), model.dtype, library=True):
        for index, block in enumerate(blocks_of(model, paths)):
            transform.block(index, block)


def _stored(
    weights: Weights, layout: Layout, packed: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]
) -> list[Check]:
    """Make the checks `scales.finite` and `bits_per_weight.checkpoint`, from the files."""
    bad: list[str] = []
    bits, planned, slack, count = 0, 0.0, 0, 0
    for prefix, scheme in packed.items():
        if not _scales_are_good(layout, prefix, scheme, weights.read):
            bad.append(prefix)
        shape = shapes[prefix]
        parts = (prefix + part for part in layout.parts)
        bits += sum(8 * weights.entries[part].bytes for part in parts if part in weights.entries)
        planned += load_format(scheme.format).bits_per_weight(shape, scheme) * math.prod(shape)
        slack += layout.overhead(shape, scheme)
        count += math.prod(shape)
    holds = planned <= bits + 1e-6 * count and bits <= planned + slack
    where, most = "" if holds else f"planned {planned / count:.4f}", (planned + slack) / count
    return [
        Check(name="scales.finite", value=len(bad), limit=0, ok=not bad, where=", ".join(bad[:3])),
        Check(name="bits_per_weight.checkpoint", value=bits / count, limit=most, ok=holds, where=where),
    ]


def _scales_are_good(layout: Layout, prefix: str, scheme: WeightScheme, read: layouts.Read) -> bool:
    """Tell whether scales are finite, and positive except in nf4, where zeros have scale 0 and doubled ones vary."""
    try:
        scale = layout.scale(prefix, read).float()
    except QuantkitError:  # not finite
        return False
    if not scale.isfinite().all():
        return False
    if (scale > 0).all() or scheme.scale == "double":
        return True
    tensor = layout.read_back(prefix, scheme, read)
    ones = tensor.replace(scale=tensor.scale.new_ones(()).expand_as(tensor.scale), global_scale=None)
    units = split(ones.dense(), scheme)
    return not bool((units.bool() & against(tensor.scale.float() <= 0, tensor.shape, scheme)).any())


def _expanded(folder: Path, weights: Weights, layout: Layout, wanted: Expected, sizes: Mapping[str, int]) -> Check:
    """Make the check `reload.LIBRARY` (packed linears, by the library) or `reload.own_reader` (all tensors)."""
    quantization = config_json(folder).get("quantization_config") or {}
    dense = {f"{prefix}.weight": prefix for prefix in wanted.packed}
    expansion = layout.expansion(quantization, wanted.read(next(iter(dense))).dtype)
    there = wanted.there if expansion.anywhere else None
    packed = weights.read if there is None else weights.packed_on(there[0])

    def read(tensor: str) -> torch.Tensor:
        return expansion.weight(dense[tensor], packed) if tensor in dense else weights.read(tensor)

    tensors, reader = dense if expansion.library else wanted.stored, expansion.library or "own_reader"
    expected = wanted.read if there is None else there[1]
    # on a GPU one tensor at a time: its memory is less than a block's solve has taken there
    fitting = _fitting(tensors, sizes) if there is None else ([tensor] for tensor in tensors)
    check = _compared(f"reload.{reader}", folder, fitting, read, expected)
    return check.model_copy(update={"where": check.where.removesuffix(".weight")})


def _compared(
    name: str,
    folder: Path,
    groups: Iterable[list[str]],
    read: Callable[[str], torch.Tensor],
    wanted: Callable[[str], torch.Tensor],
) -> Check:
    """Check the largest difference of tensors, a group at once, up to the first unreadable or non-finite one."""

    def one(tensor: str) -> tuple[float, str]:
        """Return the difference, and the reason if the tensor cannot be read."""
        expected = wanted(tensor)
        try:
            value = read(tensor)
            return _difference(value, expected) if value.shape == expected.shape else math.inf, ""
        except (RuntimeError, ValueError, AssertionError, KeyError) as trouble:
            if is_out_of_memory(trouble):
                raise out_of_memory(f"{folder.name}: {tensor}", trouble) from trouble
            return math.inf, f"{tensor}: {' '.join(str(trouble).split())[:160]}"

    worst, place = 0.0, ""
    for some in groups:
        for tensor, (difference, why) in zip(some, in_order(one, some), strict=True):
            if why:
                return _judge(name, None, why)
            if not difference <= worst:
                worst, place = difference, tensor
                if not math.isfinite(difference):
                    return _judge(name, worst, place)
    return _judge(name, worst, place)


def _fitting(tensors: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield groups of tensors to compare at once: few enough for a share of the free memory, at least one."""
    room, some = machine.memory_available() * _SHARE / _COMPARED, list[str]()
    for tensor in tensors:
        if some and (len(some) == _AT_ONCE or sum(sizes.get(name, 0) for name in (*some, tensor)) > room):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    import torch

    if torch.equal(values, expected):
        return 0.0
    values, expected = values.float(), expected.float()
    return float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _judge(name: str, value: float | None, where: str, limit: float = LIMIT) -> Check:
    check = judged(name, value, limit, where)
    return check.model_copy(update={"where": ""}) if check.ok else check


def _scheme_of(prefix: str, schemes: Mapping[str, WeightScheme]) -> WeightScheme:
    """Return the scheme by name; files may lack, or have, the base model's prefix."""
    for name, scheme in schemes.items():
        if same(name, prefix):
            return scheme
    rule, remedy = "the manifest lists every quantized layer", "make the bundle again"
    raise InputError("layer-unlisted", prefix, "is packed, but the manifest does not list it", rule, remedy)


def block_of(name: str) -> int:
    """Return the number of a tensor's block; -1 outside of blocks."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else -1


def config_json(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises InputError `config-invalid`."""
    return strict_json(limits.read(folder / "config.json"), "config.json", "config-invalid")


def class_of(folder: Path) -> Any:
    """Return the checkpoint's class: transformers' own, or one in trusted code. Raises InputError `remote-code`."""
    return model_class_of(config_json(folder), folder, str(folder), pretrained.is_trusted(folder))


def config_of(folder: Path, blocks: int | None, *, dense: bool = False, apart: Collection[str] = ()) -> Any:
    """Read the config, cut to the first blocks; `dense` without the quantization; `apart` as `Expected.outside`."""
    config = pretrained.config(folder)
    if dense and hasattr(config, "quantization_config"):
        del config.quantization_config
    if blocks is not None:
        cut_config(config, blocks)
        _cut_targets(getattr(config, "quantization_config", None), blocks, apart)
    return config


def _cut_targets(quantization: Any, blocks: int, apart: Collection[str]) -> None:
    """Remove later blocks from config groups: the library warns of every linear that it does not find."""
    if not isinstance(quantization, dict) or not isinstance(quantization.get("config_groups"), dict):
        return
    groups = quantization["config_groups"]
    for name, group in list(groups.items()):
        group["targets"] = [
            target for target in group["targets"] if block_of(target) < blocks or f"{target}.weight" in apart
        ]
        if not group["targets"]:
            del groups[name]


def loaded(
    model_class: Any, folder: Path, blocks: int | None, leftover: Collection[str], apart: Collection[str] = ()
) -> tuple[Any, str]:
    """Load the model as plain transformers does, and describe what is wrong with its keys."""
    options = {"config": config_of(folder, blocks, apart=apart), "dtype": "auto", "output_loading_info": True}
    model, info = pretrained.network(model_class, folder, first=blocks, **options)
    info["unexpected_keys"] = {
        name
        for name in info["unexpected_keys"]
        if (blocks is None or block_of(name) < blocks)
        and not any(name.endswith(other) if other.startswith(".") else same(name, other) for other in leftover)
    }
    for kind in ("missing", "unexpected", "mismatched"):
        if names := info[f"{kind}_keys"]:
            return model, f"{len(names)} {kind} keys, first {min(map(str, names))}"
    return model, ""


def batch(model: Any) -> dict[str, torch.Tensor]:
    """Return two fixed sequences of 24 tokens."""
    import torch

    from quantkit.model.streaming.calls import texts

    inner = model.config.get_text_config()
    length = min(24, positions(model.config.to_dict()) or 24)
    ids = torch.arange(2 * length).mul(7919).remainder(inner.vocab_size).reshape(2, length)
    return texts(model, ids)


def logits(model: Any, inputs: Mapping[str, torch.Tensor], *, cached: bool) -> torch.Tensor:
    """Run a model for its logits, without a cache unless it quantizes: not every class fills that of a cut model."""
    import torch

    from quantkit.model.streaming.calls import uncached

    with torch.no_grad(), nullcontext() if cached else uncached(model):
        return model.eval()(**inputs)[0].float()  # type: ignore[no-any-return]
