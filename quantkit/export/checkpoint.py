"""A folder that plain transformers, with compressed-tensors, and vLLM load.

The shards are the source's: same names, same tensors in each, so that what was in one file stays in one file. Each is
written with one tensor in memory. A quantized linear's `X.weight` becomes the tensors of a layout in `model/layouts`;
with `layout: dense` it stays one tensor, holding the values that the codes stand for, which loads wherever the source
does. Tokenizer, generation config, chat template and licence are carried over as they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from quantkit import registry
from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import InputError, did_you_mean
from quantkit.export import _experts, _reload
from quantkit.export._asked import Asked
from quantkit.model import layouts, run_time
from quantkit.model.layouts import Header, Layout
from quantkit.model.run_time import RunTime
from quantkit.model.weights import (
    INDEX,
    SINGLE,
    checked_file,
    dtype_name,
    torch_dtype,
    write_atomic,
    write_safetensors,
)
from quantkit.passes import decision

if TYPE_CHECKING:
    import torch

    from quantkit.model.finished import Finished
    from quantkit.model.open import Source
    from quantkit.model.stream import StreamedModel
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
    from quantkit.target import State

# weights in any other form, code, and what describes the source rather than the result
_LEFT_BEHIND = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx", ".xml"),
    *(".gguf", ".tflite", ".npz", ".npy", ".mlmodel", ".tar", ".gz", ".zip", ".py", ".pyc", ".so"),
}
_REPLACED = {"config.json", "README.md", INDEX}

DENSE = "dense"


class CheckpointOptions(Closed):
    """Settings of `export: - checkpoint: {…}`.

    Args:
        layout: one of `quantkit/model/layouts`, or `dense`: dequantized, in the source's dtype.
    """

    layout: str = "pack-quantized"

    @field_validator("layout")
    @classmethod
    def _known_layout(cls, value: str) -> str:
        known = [*layouts.names(), DENSE]
        if value not in known:
            raise ValueError(f"no layout is called {value!r}; {did_you_mean(value, known)}")
        return value

    @property
    def found(self) -> Layout | None:
        """How quantized linears are stored; None: as their values."""
        return None if self.layout == DENSE else layouts.load(self.layout)


@dataclass(frozen=True)
class Writer:
    """A checkpoint to be written, shard by shard.

    Args:
        source: what the weights come from where nothing changed them.
        finished: what the passes decided, by the skeleton's names.
        files: parameter of the skeleton -> tensor of the files.
        linears: linears of the skeleton -> whether their weight is stored [K, N].
        options: the layout.
        blocks: names of the skeleton's blocks.
        attention: what a block calls its attention; only asked for where its cache is quantized.
    """

    source: Source
    finished: Finished
    files: Mapping[str, str]
    linears: Mapping[str, bool]
    options: CheckpointOptions
    blocks: Sequence[str] = ()
    attention: str = ""

    @cached_property
    def run_time(self) -> RunTime:
        """How inputs and cache are quantized when the model runs."""
        return run_time.of_results(self.finished, self.blocks)

    @cached_property
    def fixed(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the files -> shard and value, of the fixed scales of inputs and caches."""
        entries = self.source.weights.entries
        found: dict[str, tuple[str, torch.Tensor]] = {}
        for linear, static in self.run_time.scales.items():
            entry = entries[self.files[f"{linear}.weight"]]
            prefix = entry.name.removesuffix(".weight")
            found[prefix + run_time.INPUT_SCALE] = entry.shard, static.scale.reshape(1)
            if static.zero is not None:
                found[prefix + run_time.INPUT_ZERO] = entry.shard, static.zero.reshape(1)
        for index, pair in self.run_time.cache_scales.items():
            inside = f"{self.blocks[index]}.{self.attention}."
            name = next(name for name in self.files if name.startswith(inside))
            entry = entries[self.files[name]]
            prefix = entry.name.removesuffix(name.removeprefix(inside))
            for part, static in zip((run_time.KEY_SCALE, run_time.VALUE_SCALE), pair, strict=True):
                found[prefix.removesuffix(".") + part] = entry.shard, static.scale
        return found

    @cached_property
    def layout(self) -> Layout | None:
        """How quantized linears are stored; None: as their values, or there are none."""
        return self.options.found if self.finished.schemes else None

    @cached_property
    def stored(self) -> dict[str, str]:
        """Prefix in the files -> linear, of what the layout stores."""
        if self.layout is None:
            return {}
        return {self.files[f"{linear}.weight"].removesuffix(".weight"): linear for linear in self.finished.schemes}

    @cached_property
    def packed(self) -> dict[str, WeightScheme]:
        """Prefix in the files -> scheme, of what the layout stores."""
        return {prefix: self.finished.schemes[linear] for prefix, linear in self.stored.items()}

    @property
    def dtype(self) -> torch.dtype:
        """What the model is loaded in."""
        return _reload.loading_dtype(self.source.config, self.source.dtype)

    @property
    def shards(self) -> list[str]:
        """The file names to write."""
        return self.source.weights.shards

    @property
    def _quantized(self) -> dict[str, str]:
        """Tensor of the files -> the linear that is quantized."""
        return {self.files[f"{linear}.weight"]: linear for linear in self.finished.schemes}

    @property
    def _changed(self) -> dict[str, str]:
        """Tensor of the files -> the parameter that has a new value."""
        return {self.files[name]: name for name in self.finished.changed}

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json."""
        written, schemes = None, self.finished.schemes
        if self.layout is not None:
            others = [name for name in self.linears if name not in schemes]
            written = self.layout.quantization_config(schemes, others, str(self.dtype).removeprefix("torch."))
        return run_time.described(written, list(schemes), self.run_time.activations, self.run_time.cache)

    def headers(self, shard: str) -> list[Header]:
        """What a shard will hold, in the source's order."""
        found: list[Header] = []
        for entry in self.source.weights.entries.values():
            if entry.shard != shard:
                continue
            prefix = entry.name.removesuffix(".weight")
            if self.layout is not None and prefix in self.stored:
                rows, columns = entry.shape
                found += self.layout.headers(prefix, (rows, columns), self.packed[prefix])
            else:
                found.append((entry.name, entry.dtype, entry.shape))
        fixed = {name: value for name, (place, value) in self.fixed.items() if place == shard}
        return found + [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in fixed.items()]

    def write_shard(self, shard: str, path: Path) -> str:
        """Write one shard and return its sha256.

        Raises:
            InputError: `scale-inexact`, `layout-unsupported`.
            Stopped: `disk-full`.
        """
        producer = _Producer(self)
        return write_safetensors(path, self.headers(shard), producer)

    def write_rest(self, folder: Path) -> None:
        """Write config.json, the index, and what is carried over."""
        config = dict(self.source.config)
        if not config.keys() & {"dtype", "torch_dtype"}:
            # else a loader takes the dtype of the first tensor it finds, which may be a scale
            config["dtype"] = self.source.dtype
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        write_atomic(folder / "config.json", [_json(config)])
        if self.shards != [SINGLE]:
            placed = {header[0]: shard for shard in self.shards for header in self.headers(shard)}
            total = sum(_size(header) for shard in self.shards for header in self.headers(shard))
            write_atomic(folder / INDEX, [_json({"metadata": {"total_size": total}, "weight_map": placed})])
        for path, name in carried(self.source.path):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, [path.read_bytes()])

    def write(self, folder: Path) -> None:
        """Write everything."""
        folder.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            self.write_shard(shard, folder / shard)
        self.write_rest(folder)

    def expected(self, name: str) -> torch.Tensor:
        """What a loader has to have under a name of the files; from the codes, and not from what was written."""
        prefix = name.removesuffix(".weight")
        if self.layout is not None and prefix in self.stored:
            tensor = self.finished.quantized(self.stored[prefix])
            return self.layout.as_loaded(tensor, self.dtype, self.quantization or {})
        return self.dense(name)

    def dense(self, name: str) -> torch.Tensor:
        """A tensor of the dense model, in the dtype and shape it has in the source."""
        entry = self.source.weights.entries[name]
        quantized, changed = self._quantized, self._changed
        if name in quantized:
            return self._values(quantized[name], entry.shape).to(torch_dtype(entry.dtype))
        if name in changed:
            return self.finished.tensor(changed[name]).to(torch_dtype(entry.dtype))
        return self.source.weights.read(name)

    def _values(self, linear: str, shape: tuple[int, ...]) -> torch.Tensor:
        """What a linear's codes stand for, float32, without padding, as its weight lies in the files."""
        tensor = self.finished.quantized(linear)
        values: torch.Tensor = registry.load("formats", tensor.scheme.format).dequantize(tensor)
        if self.linears[linear]:
            return values[:, : shape[0]].T.contiguous()
        return values[:, : shape[1]].contiguous()


class _Producer:
    """Name -> tensor of a shard, each asked for once.

    The writer asks by element size, so some parts of a linear come long after others. The small ones wait; its codes
    are packed when it is their turn.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: dict[str, torch.Tensor] = {}
        # stored tensor -> the linear it is of
        self._prefixes = {prefix + part: prefix for prefix in writer.stored for part in self._parts}

    @property
    def _parts(self) -> tuple[str, ...]:
        return self._writer.layout.parts if self._writer.layout is not None else ()

    def __call__(self, name: str) -> torch.Tensor:
        writer = self._writer
        if name in writer.fixed:
            return writer.fixed[name][1]
        if writer.layout is None or name not in self._prefixes:
            return writer.dense(name)
        if name in self._waiting:
            return self._waiting.pop(name)
        prefix = self._prefixes[name]
        tensor = writer.finished.quantized(writer.stored[prefix])
        if name == prefix + writer.layout.codes:
            return writer.layout.packed(tensor)
        self._waiting.update(writer.layout.companions(prefix, tensor, writer.dtype))
        return self._waiting.pop(name)


def _size(header: Header) -> int:
    return math.prod(header[2]) * torch_dtype(header[1]).itemsize


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def carried(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, name in the new folder) of what goes along unchanged: tokenizer, generation config, template, licence.

    Links that lead out of the folder, hidden files, code and other weights stay behind.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            # `model.onnx_data` and the like: an ONNX file's own weights
            weights = name.endswith(".index.json") or ".onnx" in name.lower() or path.suffix.lower() in _LEFT_BEHIND
            if weights or relative in _REPLACED or name.startswith("."):
                continue
            try:
                yield checked_file(path.parent, name), relative
            except InputError:
                continue


class Checkpoint:
    """The exporter. `runtimes`: what loads the result."""

    name = "checkpoint"
    runtimes = ("torch", "vllm")
    fuses = False
    Options = CheckpointOptions

    def accepts(self, options: Mapping[str, Any], asked: Asked) -> None:
        """Refuse, before any work, what the layout cannot hold.

        Args:
            options: of the recipe's export step.
            asked: the layers.

        Raises:
            InputError: `layout-unsupported`, naming the first layer.
            MissingDependency: what the layout is written with.
        """
        schemes = asked.schemes
        for linear in asked.tied:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="is quantized and shares its weight with the embedding, which is not",
                rule="transformers stores tied weights once, as one or the other",
                remedy="keep: [embeddings, lm_head], or leave `checkpoint` out of `export`",
            )
        layout = CheckpointOptions(**options).found
        chosen = CheckpointOptions(**options).layout if schemes else DENSE
        run_time.refuse(asked.activations, asked.cache, chosen, all(scheme.symmetric for scheme in schemes.values()))
        for linear in sorted(set(asked.merged) & set(asked.activations))[:1]:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="belongs to a mixture of experts",
                rule="transformers merges experts while it loads them, and leaves their inputs alone",
                remedy="an override for the experts with `activations: null`",
            )
        if layout is None or not schemes:
            return
        _experts.demand_loadable(CheckpointOptions(**options).layout, schemes, asked.merged, asked.partly)
        for linear, scheme in schemes.items():
            reason = "its weight is stored [K, N]" if linear not in asked.plain else ""
            reason = f"its last group of {scheme.group} is padded" if linear in asked.padded else reason
            if reason:
                raise InputError(
                    "layout-unsupported",
                    where=linear,
                    value=reason,
                    rule="it packs torch.nn.Linear whose groups divide K",
                    remedy="export: checkpoint: {layout: dense}",
                )
        layout.accepts(schemes, asked.shapes)

    def holds(
        self,
        options: Mapping[str, Any],
        runtime: str,
        weights: Mapping[str, WeightScheme],
        activations: Mapping[str, ActivationScheme],
        cache: CacheScheme | None,
    ) -> State:
        """What the export leaves of what a runtime can do with the formats of a recipe; no model is needed to say so.

        Args:
            options: of the recipe's export step.
            runtime: that will read it: one of `runtimes`.
            weights, activations: how they are quantized; keys are where a recipe says so: `scheme`,
                `overrides: *.o_proj`.
            cache: how keys and values are quantized.

        Returns:
            `native` where it leaves all of it, `emulated` where floats are stored.

        Raises:
            InputError: `layout-unsupported`; it cannot be stored so, or that runtime has no kernel for it so.
        """
        chosen = CheckpointOptions(**options)
        if chosen.found is None:
            return "emulated" if weights else "native"
        for place, scheme in weights.items() if runtime == "vllm" else ():
            if not chosen.found.served(scheme):
                raise InputError(
                    "layout-unsupported",
                    where=place,
                    value=f"{scheme.format} by {scheme.granularity}{f' of {scheme.group}' if scheme.group else ''}",
                    rule=f"vLLM has no kernel for it in the layout {chosen.layout}",
                    remedy="transformers loads it",
                )
        return "native"

    def writer(self, source: Source, stream: StreamedModel, results: Finished, options: Mapping[str, Any]) -> Writer:
        """Prepare an export."""
        from quantkit.model.structure import is_linear, is_transposed

        modules = stream.skeleton.named_modules()
        linears = {name: is_transposed(module) for name, module in modules if is_linear(module)}
        attention = run_time.attention_of(stream.blocks[0]) if results.cache is not None else ""
        chosen = CheckpointOptions(**options)
        return Writer(source, results, stream.files, linears, chosen, stream.block_names, attention)

    def write(
        self, bundle: Path, source: Source, stream: StreamedModel, results: Finished, options: Mapping[str, Any]
    ) -> list[Decision]:
        """Write `model/` of a bundle; the decisions say who checks it.

        Raises:
            InputError: `scale-inexact`, `layout-unsupported`.
            Stopped: `disk-full`.
        """
        writer = self.writer(source, stream, results, options)
        writer.write(bundle / "model")
        taken = []
        if run_time.expands_at_load(bundle / "model") and results.cache is not None:
            reason = (
                "transformers expands packed weights as it loads them, and then leaves the cache alone; vLLM does not"
            )
            taken.append(decision("checkpoint", "cache-elsewhere", "scheme.kv_cache", reason))
        absent = layouts.missing(writer.layout) if writer.layout is not None else []
        if not absent:
            return taken
        reason = (
            f"checked with our own reader of the stored files; pip install {' '.join(absent)} to check it with the "
            "code that others load it with"
        )
        return [*taken, decision("checkpoint", "own-reader", "model/", reason)]

    def check(
        self,
        bundle: Path,
        source: Source | None = None,
        stream: StreamedModel | None = None,
        results: Finished | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        blocks: int | None = None,
    ) -> list[Check]:
        """Load what was written in other people's code and hold it against the codes that were decided on.

        Args:
            bundle: its folder.
            source, stream, results, options: as for `write`. Without them, for a finished bundle, the expected values
                are our own reading of the stored codes.
            inputs: keyword arguments of a forward; a fixed batch of ids by default.
            blocks: compare the outputs of only so many layers; by default all of a small model, two of a large one.

        Returns:
            checks `scales.finite`, `bits_per_weight.checkpoint`, `reload.LIBRARY` (every linear) and
            `reload.transformers` (the logits); `where` says what is wrong with one that is not `ok`.

        Raises:
            InputError: it is not a bundle.
        """
        if source is None or stream is None or results is None:
            return _reload.check_bundle(Path(bundle), inputs=inputs, blocks=blocks)
        writer = self.writer(source, stream, results, options or {})
        wanted = _reload.Expected(
            names=list(source.weights.entries),
            read=writer.expected,
            layout=writer.layout,
            packed=writer.packed,
            leftover=[name for name in source.weights.entries if name not in set(writer.files.values())],
            run_time=writer.run_time,
        )
        return _reload.check(bundle / "model", wanted, inputs=inputs, blocks=blocks)


EXPORT = Checkpoint()
