"""A folder that plain transformers, with compressed-tensors, and vLLM load.

A quantized linear's `X.weight` becomes the tensors of a layout in `model/layouts`;
with `layout: dense` it stays one tensor with the values of the codes, which loads wherever the source
does. Tokenizer, generation config, chat template and licence are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import InputError, did_you_mean
from quantkit.exporters import SYMMETRIC, Exporter, LayerSpec, Trial, unheld
from quantkit.exporters.checkpoint import reload
from quantkit.exporters.checkpoint.writer import Writer, torn
from quantkit.model import layouts, run_time
from quantkit.model.layouts import VLLM_ALONE, Layout
from quantkit.model.sizes.storage import padded
from quantkit.model.source import converted
from quantkit.passes import decision
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.model.streaming.own_forward import Answering
    from quantkit.target import State, Target


DENSE, _DENSE = "dense", layouts.DENSE


class CheckpointOptions(Closed):
    """Settings of `export: - checkpoint: {…}`.

    Args:
        layout: name in `quantkit/model/layouts`, or `dense`: dequantized, in the source's dtype.
        readers: `all`: transformers and vLLM load it; `vllm`: it may have packed experts that only vLLM loads.
    """

    layout: str = "pack-quantized"
    readers: Literal["all", "vllm"] = "all"

    @field_validator("layout")
    @classmethod
    def _known_layout(cls, value: str) -> str:
        known = [*layouts.names(), DENSE]
        if value not in known:
            raise ValueError(f"no layout is called {value!r}; {did_you_mean(value, known)}")
        return value

    @property
    def found(self) -> Layout | None:
        """Layout of quantized linears; None: they are stored as values."""
        return None if self.layout == DENSE else layouts.load(self.layout)


class Checkpoint(Exporter):
    """Exporter `checkpoint`."""

    name = "checkpoint"
    place = "model"
    runtimes = ("torch", "vllm")
    stores = "tensors"
    stacks = 2
    Options = CheckpointOptions

    def accepts(self, options: CheckpointOptions, asked: LayerSpec) -> None:
        """Refuse, before any work, layers that the layout cannot hold."""
        schemes, layout = asked.schemes, options.found
        for linear in asked.tied:
            raise unheld(
                linear,
                "is quantized and shares its weight with the embedding, which is not",
                "transformers stores tied weights once, as one or the other",
                "--set 'keep=[embeddings, lm_head]', or leave `checkpoint` out of `export`",
            )
        symmetric = all(scheme.symmetric for scheme in schemes.values())
        run_time.refuse(asked.activations, asked.cache, options.layout if schemes else DENSE, symmetric)
        libraries = set(layout.libraries) if layout is not None and schemes else set[str]()
        single = [f"{path}." for path, known in asked.apart.items() if not libraries.isdisjoint(known)]
        merged = {linear for linear in asked.merged if not linear.startswith(tuple(single))}
        for_vllm = options.readers == "vllm" and layout is not None
        here = f"{{layout: {options.layout}, readers: vllm}}"
        alone = f"--set 'export=[{{checkpoint: {here}}}]' (for vLLM alone)"
        if layout is None or not schemes:
            return
        for linear in sorted({*asked.merged} - merged if layout.kernels else ()):
            rule = "experts that transformers loads as linears are checked where their products are torch's own"
            remedy = "--recipe awq-int4, or an override that leaves the experts in high precision (weights: null)"
            raise unheld(linear, f"an expert in layout {options.layout}", rule, remedy)
        demand_loadable(options.layout, schemes, merged & set(asked.ruled), asked.partly, "" if for_vllm else alone)
        left = sorted(linear for linear in asked.merged if linear not in schemes)
        if layout.stacks and (left or asked.partly):
            rule, remedy = "this layout holds all experts of a model, or none", "--set calibration.experts=force"
            raise unheld(left[0] if left else "calibration.experts", "an expert in high precision", rule, remedy)
        for obstacle in asked.obstacles:
            # vLLM's names of an expert's linears have no joined gate and up
            named = obstacle.merged and not obstacle.where.endswith(".gate_up_proj")
            spared = (obstacle.merged and layout.stacks) or (named and for_vllm)
            if obstacle.hinders(schemes, layout.libraries) and not spared:
                ways = [one.asked for one in _stacking(asked)] if obstacle.merged else []
                ways += [alone] if named else []
                if not (obstacle.always or obstacle.merged):
                    ways.append("an override that leaves it in high precision (weights: null)")
                ways.append(f"--set scheme.activations=null {_DENSE}" if asked.activations else _DENSE)
                rule = "transformers alone must load the checkpoint"
                raise unheld(obstacle.where, obstacle.why, rule, ", or ".join(ways))
        for linear in sorted(merged & set(asked.activations))[: not for_vllm]:
            rule = "transformers merges experts while it loads them, and does not quantize their inputs"
            remedy = f"{alone}, or add an override for the experts with `activations: null`"
            raise unheld(linear, "belongs to a mixture of experts", rule, remedy)
        for linear, scheme in schemes.items():
            if linear in asked.padded:
                raise padded(linear, scheme, asked.shapes[linear][1] if linear in asked.shapes else None)
            if linear not in asked.plain:
                raise unheld(linear, "its weight is stored [K, N]", "the layout packs [N, K]", _DENSE)
        layout.accepts(schemes, asked.shapes)

    def holds(self, options: CheckpointOptions, runtime: str, asked: LayerSpec) -> State:
        """Return the support as `Exporter.holds`: floats in `dense`; vLLM has kernels for some schemes."""
        layout, symmetric = options.found, all(scheme.symmetric for scheme in asked.schemes.values())
        run_time.refuse(asked.activations, asked.cache, options.layout if asked.schemes else DENSE, symmetric)
        if layout is None:
            return "emulated" if asked.schemes else "native"
        for place, scheme in asked.schemes.items() if runtime == "vllm" else ():
            if not layout.served(scheme):
                value = f"{scheme.format} by {scheme.granularity}{f' of {scheme.group}' if scheme.group else ''}"
                rule = f"vLLM has no kernel for it in the layout {options.layout}"
                raise unheld(place, value, rule, "transformers loads it")
        return "native"

    def storage(self, options: CheckpointOptions, laid: LaidOver) -> Storage:
        """Predict the bytes as `Exporter.storage` does."""
        return laid.tensors(None if options.layout == DENSE else options.layout)

    def packs(self, options: CheckpointOptions) -> bool:
        """Tell whether it stores codes, as `Exporter.packs` does."""
        return options.layout != DENSE

    def for_target(
        self, options: CheckpointOptions, target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """Warn if vLLM would refuse a checkpoint that transformers loads.

        Raises InputError `target-cannot-run`: no other runtime of the target reads it.
        """
        kinds = {name: (scheme, asked.activations.get(name)) for name, scheme in asked.schemes.items()}
        split = torn(kinds, asked.shapes) if options.found is not None else ""
        why = f"vLLM does not load it: its {split} is made of several linears, which are not stored alike"
        if options.found is not None and (packed := sorted(set(asked.merged) & asked.schemes.keys())):
            form = asked.schemes[packed[0]].format
            try:
                target.demand_experts(form, "vllm")
            except InputError as problem:
                if {*self.runtimes} & {*target.runtimes} == {"vllm"}:
                    raise
                return {}, f"vLLM does not load its experts in {form}: {problem.rule.removeprefix('source: ')}"
        return {}, why if split else ""

    def caveat(self, options: CheckpointOptions, runtime: str) -> str:
        """Describe caveats as `Exporter.caveat` does."""
        return options.found.serving if options.found is not None and runtime == "vllm" else ""

    def export(self, folder: Path, values: Values, options: CheckpointOptions) -> list[Decision]:
        """Write `model/` of a bundle; the decisions name the library that checks it.

        Raises InputError: `scale-inexact`, `layout-unsupported`; Stopped: `disk-full`.
        """
        writer = Writer.of(values, options.found)
        writer.write(folder)
        taken = []
        if run_time.expands_at_load(folder) and writer.finished.cache is not None:
            reason = (
                "transformers expands packed weights as it loads them, and then leaves the cache alone; vLLM does not"
            )
            taken.append(decision("checkpoint", "cache-elsewhere", "scheme.kv_cache", reason))
        if writer.unread:
            reason = "transformers has no rule for packed experts of this class, and would leave them at random; "
            reason += "`verify` tells whether vLLM loads them"
            taken.append(decision("checkpoint", VLLM_ALONE, writer.unread[0], reason))
        if any(isinstance(entry, converted.ConvertedTensor) for entry in writer.source.weights.entries.values()):
            taken.append(decision("checkpoint", "converted-names", "model/", converted.NOTE))
        if absent := layouts.missing(writer.layout) if writer.layout is not None else []:
            reason = f"checked with our own reader of the stored files; pip install {' '.join(absent)} to check it with"
            taken.append(decision("checkpoint", "own-reader", "model/", f"{reason} the code that others load it with"))
        return taken

    def check(
        self,
        bundle: Path,
        values: Values | None = None,
        options: CheckpointOptions | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        blocks: int | None = None,
        beside: Answering | None = None,
    ) -> list[Check]:
        """Load the checkpoint in other people's code and compare it with the codes.

        Without `values` the expected ones come from our own reading of the stored codes. By default the outputs of all
        layers of a small model are compared, and of two layers of a large one. Checks are `scales.finite`,
        `bits_per_weight.checkpoint`, `reload.LIBRARY` (every linear) and `reload.transformers` (the logits); `where`
        explains a failure.

        Raises InputError: it is not a bundle.
        """
        if values is None:
            return reload.check_bundle(Path(bundle), inputs=inputs, blocks=blocks)
        writer = Writer.of(values, (options or CheckpointOptions()).found)
        used = set(writer.files.values())
        leftover = [name for name in writer.source.weights.entries if name not in used]
        there = None if values.device is None else (values.device, partial(writer.expected, device=values.device))
        shown = (writer.names, writer.expected, writer.layout, writer.packed, leftover, writer.run_time, there)
        apart = writer.outside if writer.source.sees else ()
        wanted = reload.Expected(*shown, writer.joined, unread=bool(writer.unread), outside=apart)
        return reload.check(bundle / self.place, wanted, inputs=inputs, blocks=blocks, beside=beside)


def _stacking(asked: LayerSpec) -> list[Layout]:
    """List the layouts of a model's merged experts."""
    known = [layouts.load(name) for name in layouts.names()]
    return [one for one in known if asked.class_name in one.classes]


def demand_loadable(
    layout: str, schemes: Mapping[str, WeightScheme], merged: Collection[str], partly: bool, alone: str
) -> None:
    """Refuse packed experts if transformers would lose or misread them. Raises InputError `layout-unsupported`.

    transformers 5 merges the linears of experts into 3-D parameters while it loads them, and unpacks packed ones
    (`integrations/compressed_tensors.py`, `CompressedTensorsDequantize`). It reads codes, scales and shapes, but no
    zero points; it uses one scheme for all expert linears of a model; an expert in high precision is lost. `partly` is
    True if calibration may leave some of them in high precision.
    `alone` is the remedy for vLLM alone; "" for a checkpoint that only vLLM reads, which holds any scheme of them.
    """

    def refusal(where: str, value: str, remedy: str) -> InputError:
        rule = "transformers loads packed experts in pack-quantized alone, all in one scheme without zero points"
        return unheld(where, value, rule, remedy)

    if not merged:
        return
    if alone and layout != "pack-quantized":
        raise refusal(min(merged), f"an expert in layout {layout}", f"{alone}, or --recipe int4-symmetric")
    for linear in sorted(merged):
        scheme = schemes.get(linear)
        if scheme is None:
            raise refusal(linear, "an expert in high precision among packed layers", _DENSE)
        if alone and not scheme.symmetric:
            one = any(other.symmetric for other in schemes.values())
            raise refusal(linear, "an expert with zero points", "--recipe int4-symmetric" if one else SYMMETRIC)
    if partly:
        value = "keep may leave an expert in high precision"
        raise refusal("calibration.experts", value, "--set calibration.experts=force")
    kinds = {(scheme.format, scheme.granularity, scheme.group, scheme.symmetric) for scheme in schemes.values()}
    if alone and len(kinds) > 1:
        raise refusal(min(merged), "one of several schemes of a model with experts", "--recipe int4-symmetric")


EXPORT = Checkpoint()
