"""The network that an engine is built from: `network.onnx` in operators of ONNX, its weights, config and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.exporters.onnx.exporter import context_of, dialect_weights
from quantkit.exporters.tensorrt.profiles import capacity
from quantkit.runtimes.tensorrt.file import DATA, NETWORK
from quantkit.target import Profile

if TYPE_CHECKING:
    from quantkit.exporters.tensorrt.exporter import TensorrtOptions
    from quantkit.exporters.tensorrt.network.dialect import CacheScales
    from quantkit.exporters.values import Values


def write_network(folder: Path, values: Values, options: TensorrtOptions, profiles: Sequence[Profile]) -> None:
    """Write `network.onnx`, its weights, config and tokenizer."""
    import torch

    from quantkit.exporters.carried import carry
    from quantkit.exporters.tensorrt.network.dialect import TensorrtDialect
    from quantkit.exporters.trace.rewrite import keep_few, save
    from quantkit.exporters.trace.transformer import trace

    source = values.source
    decoder = source.kind == "decoder"
    traced = trace(
        values.skeleton,
        "decoder" if decoder else "encoder",
        floats=getattr(torch, options.type),
        positions=decoder,
    )
    needed, most = capacity(profiles, context_of(source.config)), context_of(source.config)
    if options.capacity is not None and not needed <= options.capacity <= most:
        raise InputError(
            "profile-impossible",
            where="tensorrt.capacity",
            value=f"a cache of {options.capacity} tokens",
            rule=f"the profiles need {needed}, the model has {most}",
            remedy="leave it out: the profiles say how many",
        )
    dialect = TensorrtDialect(
        traced,
        dialect_weights(values),
        quantized=values.quantized,
        type=options.type,
        cache=options.cache,
        capacity=options.capacity or needed,
        stored_cache=_cache_scales(values),
    )
    model = dialect.apply()
    if decoder:
        keep_few(model, optional=False)
    model.metadata_props.update({"quantkit.kind": source.kind, "quantkit.type": options.type})
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / NETWORK, DATA)
    carry(source, folder)


def _cache_scales(values: Values) -> CacheScales | None:
    from quantkit.exporters.tensorrt.network.dialect import CacheScales

    how = values.run_time
    if how.cache is None:
        return None
    scales = {
        layer: (float(keys.scale.float().reshape(-1)[0]), float(own.scale.float().reshape(-1)[0]))
        for layer, (keys, own) in how.cache_scales.items()
    }
    return CacheScales(how.cache.format, scales)
