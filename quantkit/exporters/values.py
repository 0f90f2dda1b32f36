"""Values of an export, from a running compile or from a finished bundle.

Both have one form: a skeleton, and for every name in it either the codes of a linear or plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.formats import QuantTensor
from quantkit.formats.base.activation import InputCodes
from quantkit.model import run_time
from quantkit.model.finished import DenseWeights, Finished
from quantkit.model.run_time import RunTime
from quantkit.model.source.open import Source
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.streaming.transforms import QuantizedCaches, QuantizedInputs
from quantkit.model.structure.traced import is_linear, is_transposed
from quantkit.runtimes.torch.reloaded import reloaded
from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class Values:
    """A model to be exported."""

    # the model with the values of the codes; `stream.source` has config and tokenizer
    stream: StreamedModel
    schemes: Mapping[str, WeightScheme]  # quantized linear of the skeleton -> scheme
    quantized: Callable[..., QuantTensor]  # linear -> its codes; with `codes=False` everything else, and their shape
    # quantization of inputs at run time; `stream` has none
    run_time: RunTime = field(default_factory=RunTime)
    # a parameter before it was quantized, in the basis of the codes, float32; None for a bundle
    before: Callable[[str], Tensor] | None = None
    # original, finished: in a compile, the source's model and the results of the passes; None for a bundle
    original: StreamedModel | None = None
    finished: Finished | None = None
    # where what was written is compared with it; None: the processor
    device: torch.device | None = None

    @property
    def skeleton(self) -> nn.Module:
        """Model's class without weights."""
        return self.stream.skeleton

    @property
    def source(self) -> Source:
        """Source of config, tokenizer and tensors that are not quantized."""
        return self.stream.source

    @property
    def inputs(self) -> dict[str, InputCodes]:
        """Linear -> quantization of its input, for those that have one."""
        dtype, inputs = getattr(torch, self.source.dtype), {}
        for name, scheme in self.run_time.activations.items():
            static = self.run_time.scales.get(name)
            if static is None:
                inputs[name] = InputCodes(scheme)
                continue
            zero = 0 if static.zero is None else int(static.zero)
            moved = static.moved
            channels = () if moved is None else (tuple(moved.shift.tolist()), tuple(moved.scale.tolist()))
            inputs[name] = InputCodes(scheme, float(static.scale.to(dtype)), zero, channels)
        return inputs

    def running(self) -> StreamedModel:
        """Return the model as it runs, with quantized inputs."""
        model = StreamedModel(self.source, files=self.stream.files).on(self.stream.device, self.stream.place)
        model.transforms += self.run_time.transforms(model.block_names, getattr(torch, self.source.dtype))
        return model

    def tensor(self, name: str) -> Tensor:
        """Read a parameter or buffer by its name in the skeleton, float32."""
        return self.stream.tensor(name) if name in self.stream.files else self.stream.value(self.skeleton, name)

    def linears(self) -> dict[str, bool]:
        """Map every linear of the skeleton to whether its weight is stored as [K, N]."""
        return {name: is_transposed(module) for name, module in self.skeleton.named_modules() if is_linear(module)}

    @classmethod
    def of_results(cls, source: Source, stream: StreamedModel, results: Finished) -> Values:
        """Make the values from a compile's results."""
        files = apart(stream.files, results.schemes)
        transposed = {name: is_transposed(stream.skeleton.get_submodule(name)) for name in results.schemes}
        weights = DenseWeights.of_results(source.weights, stream.files, files, results, transposed)
        dense = StreamedModel(replace(source, weights=weights), files=files)
        how = run_time.of_results(results, stream.block_names)
        if any(scale.moved is not None for scale in how.scales.values()):
            dtype = getattr(torch, source.dtype)
            dense.transforms.append(QuantizedInputs(dense.block_names, how.activations, how.scales, dtype, on=False))

        def before(name: str) -> Tensor:
            return stream.value(stream.rest(), name) if stream.transforms else stream.tensor(name)

        return cls(dense, results.schemes, results.quantized, how, before, stream, results)

    @classmethod
    def of_bundle(cls, path: Path) -> Values:
        """Read a finished bundle's checkpoint: the numbers of `of_results` in the compile that wrote it.

        Raises InputError: `bundle-without-checkpoint`, `bundle-dense`.
        """
        bundle = Bundle.load(path)
        folder = bundle.model_folder
        if not (folder / "config.json").is_file():
            rule, remedy = "an export is made from the checkpoint", "compile with `export: [checkpoint: {}]`"
            raise InputError("bundle-without-checkpoint", str(path), "no model/config.json", rule, remedy)
        stream = reloaded(folder)
        layers = {layer.name: WeightScheme.model_validate(layer.scheme) for layer in bundle.manifest.layers}
        weights = stream.source.weights
        if layers and not isinstance(weights, DenseWeights):
            rule, remedy = "an export needs the codes", "compile with `export: [checkpoint: {layout: pack-quantized}]`"
            raise InputError("bundle-dense", str(path), "its checkpoint holds dequantized weights", rule, remedy)
        prefixes = {linear: stream.files[f"{linear}.weight"].removesuffix(".weight") for linear in layers}

        def quantized(linear: str, *, codes: bool = True) -> QuantTensor:
            assert isinstance(weights, DenseWeights) and weights.layout is not None
            return weights.layout.read_back(prefixes[linear], layers[linear], weights.stored.read)

        if isinstance(weights, DenseWeights):
            # a library rounds expanded values to the model's dtype; an export has the codes
            linears = {prefix: linear for linear, prefix in prefixes.items()}

            def exact(prefix: str, _: tuple[int, ...], __: torch.device | None) -> Tensor:
                return quantized(linears[prefix]).dense()

            stream.source = replace(stream.source, weights=replace(weights, expand=exact))
        how = RunTime()
        for transform in list(stream.transforms):
            if isinstance(transform, QuantizedInputs):
                how = replace(how, activations=transform.schemes, scales=transform.scales)
            elif isinstance(transform, QuantizedCaches):
                how = replace(how, cache=transform.scheme, cache_scales=dict(transform.scales))  # type: ignore[arg-type]
            else:
                continue
            stream.transforms.remove(transform)
        return cls(stream, layers, quantized, how)


def apart(files: Mapping[str, str], quantized: Collection[str]) -> dict[str, str]:
    """Map parameters to tensors, with a separate tensor for every quantized linear.

    A head may share its weight with the embedding, which is not quantized: the tensor in the files stays the
    embedding's, and the head gets a new name.
    """
    users = Counter(files.values())
    weights = [f"{linear}.weight" for linear in quantized]
    return {**files, **{name: f"{name}, quantized" for name in weights if users[files[name]] > 1}}


def as_float32(tensor: Tensor) -> Tensor:
    """Return floating-point values in float32; other types unchanged."""
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
