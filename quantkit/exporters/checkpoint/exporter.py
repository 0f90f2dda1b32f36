"""A folder that plain transformers, with compressed-tensors, and vLLM load.

A quantized linear's `X.weight` becomes the tensors of a layout in `model/layouts`;
with `layout: dense` it stays one tensor, holding the values that the codes stand for, which loads wherever the source
does. Tokenizer, generation config, chat template and licence are carried over as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import InputError, did_you_mean
from quantkit.exporters import Exporter, LayerSpec, Trial
from quantkit.exporters.checkpoint import reload, unpacked
from quantkit.exporters.checkpoint.writer import Writer
from quantkit.model import layouts, run_time
from quantkit.model.layouts import Layout
from quantkit.model.sizes.assigned import padded
from quantkit.model.source import converted
from quantkit.passes import decision
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

    from quantkit.model.finished import Finished
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
    from quantkit.target import State, Target


DENSE = "dense"
_DENSE = "export: checkpoint: {layout: dense}"


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


class Checkpoint(Exporter):
    """See the module."""

    name = "checkpoint"
    place = "model"
    runtimes = ("torch", "vllm")
    stores = "tensors"
    Options = CheckpointOptions

    def accepts(self, options: Mapping[str, Any], asked: LayerSpec) -> None:
        """Refuse, before any work, what the layout cannot hold."""
        schemes = asked.schemes
        for linear in asked.tied:
            raise InputError(
                "layout-unsupported",
                where=linear,
                value="is quantized and shares its weight with the embedding, which is not",
                rule="transformers stores tied weights once, as one or the other",
                remedy="--set 'keep=[embeddings, lm_head]', or leave `checkpoint` out of `export`",
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
        demand_loadable(CheckpointOptions(**options).layout, schemes, asked.merged, asked.partly)
        for obstacle in asked.obstacles:
            if obstacle.hinders(schemes, layout.libraries):
                raise InputError(
                    "layout-unsupported",
                    where=obstacle.where,
                    value=obstacle.why,
                    rule="what is written, plain transformers loads",
                    remedy=(
                        "" if obstacle.always else "an override that leaves it in high precision (weights: null), or "
                    )
                    + _DENSE,
                )
        for linear, scheme in schemes.items():
            if linear in asked.padded:
                raise padded(linear, scheme, asked.shapes[linear][1] if linear in asked.shapes else None)
            if linear not in asked.plain:
                raise InputError(
                    "layout-unsupported",
                    where=linear,
                    value="its weight is stored [K, N]",
                    rule="it packs torch.nn.Linear",
                    remedy=_DENSE,
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
        """Floats are stored in `dense`; vLLM has kernels for some of what a layout stores. See `Exporter`."""
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

    def for_target(
        self, options: Mapping[str, Any], target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """Keep the options; warn where vLLM would refuse what transformers loads."""
        kinds = {name: (scheme, asked.activations.get(name)) for name, scheme in asked.schemes.items()}
        split = unpacked.torn(kinds, asked.shapes) if CheckpointOptions(**options).found is not None else ""
        if not split:
            return options, ""
        return options, f"vLLM does not load it: its {split} is made of several linears, which are not stored alike"

    def caveat(self, options: Mapping[str, Any], runtime: str) -> str:
        """What a runtime needs beside itself to read the export, or does otherwise than is stored; "" where nothing."""
        found = CheckpointOptions(**options).found
        return found.serving if found is not None and runtime == "vllm" else ""

    def writer(self, source: Source, stream: StreamedModel, results: Finished, options: Mapping[str, Any]) -> Writer:
        """Prepare an export."""
        from quantkit.model.structure.traced import is_linear, is_transposed

        modules = dict(stream.skeleton.named_modules())
        linears = {name: is_transposed(module) for name, module in modules.items() if is_linear(module)}
        embedding = stream.skeleton.get_input_embeddings()  # type: ignore[operator]
        table = next((f"{name}.weight" for name, module in modules.items() if module is embedding), "")
        attention = run_time.attention_of(stream.blocks[0]) if results.cache is not None else ""
        layout = CheckpointOptions(**options).found
        return Writer(source, results, stream.files, linears, table, layout, stream.block_names, attention)

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
        if any(isinstance(entry, converted.ConvertedTensor) for entry in source.weights.entries.values()):
            taken.append(decision("checkpoint", "converted-names", "model/", converted.NOTE))
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

        Without `source` the expected values are our own reading of the stored codes. By default the outputs of all
        layers of a small model are compared, of two of a large one.

        Returns:
            checks `scales.finite`, `bits_per_weight.checkpoint`, `reload.LIBRARY` (every linear) and
            `reload.transformers` (the logits); `where` says what is wrong with one that is not `ok`.

        Raises:
            InputError: it is not a bundle.
        """
        if source is None or stream is None or results is None:
            return reload.check_bundle(Path(bundle), inputs=inputs, blocks=blocks)
        writer = self.writer(source, stream, results, options or {})
        wanted = reload.Expected(
            names=list(source.weights.entries),
            read=writer.expected,
            layout=writer.layout,
            packed=writer.packed,
            leftover=[name for name in source.weights.entries if name not in set(writer.files.values())],
            run_time=writer.run_time,
        )
        return reload.check(bundle / "model", wanted, inputs=inputs, blocks=blocks)


def demand_loadable(layout: str, schemes: Mapping[str, WeightScheme], merged: Collection[str], partly: bool) -> None:
    """Refuse packed experts that transformers would lose or misread.

    transformers 5 merges a checkpoint's expert linears to 3-D parameters while it loads them, and expands packed ones
    on the way (`integrations/compressed_tensors.py`, `CompressedTensorsDequantize`). There it reads codes, scales and
    shapes, but no zero points; of all expert linears of a model it takes one scheme; an expert that is not packed is
    lost.

    Args:
        schemes: linear -> scheme, of those to be packed.
        partly: whether calibration may leave some of them in high precision.

    Raises:
        InputError: `layout-unsupported`.
    """
    if not merged:
        return
    if layout != "pack-quantized":
        raise _refusal(min(merged), f"an expert in {layout}", "export: checkpoint: {layout: pack-quantized}")
    for linear in sorted(merged):
        scheme = schemes.get(linear)
        if scheme is None:
            raise _refusal(linear, "an expert in high precision among packed layers", "quantize it too")
        if not scheme.symmetric:
            raise _refusal(linear, "an expert with zero points", "--set scheme.weights.symmetric=true")
    if partly:
        raise _refusal(
            "calibration.experts", "keep may leave an expert in high precision", "--set calibration.experts=force"
        )
    if len({(each.format, each.granularity, each.group, each.symmetric) for each in schemes.values()}) > 1:
        raise _refusal(min(merged), "one of several schemes of a model with experts", "give all layers one scheme")


def _refusal(where: str, value: str, remedy: str) -> InputError:
    return InputError(
        "layout-unsupported",
        where=where,
        value=value,
        rule="transformers expands packed experts without zero points, of a single scheme, and all of them",
        remedy=f"{remedy}, or {_DENSE}",
    )


EXPORT = Checkpoint()
