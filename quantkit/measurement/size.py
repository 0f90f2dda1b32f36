"""Size of a bundle's weights: bytes on disk, and bits for each quantized weight.

    bits per weight = Σ bits_l · N_l·K_l / Σ N_l·K_l      over the quantized layers, scales and zero points counted

Layers that stay in high precision (embeddings, head, norms) count in the bytes, not in the bits per weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from quantkit.bundle import FileEntry, LayerEntry
from quantkit.exporters import load_exporter
from quantkit.measurement.rows import Baseline, Row

_BYTES: dict[str, Any] = {"unit": "B", "stat": "total", "better": "lower"}


def bits_per_weight(layers: Iterable[LayerEntry]) -> float | None:
    """Average over all weights of the quantized layers; None without any."""
    counted = [(prod(layer.shape), layer.bits_per_weight) for layer in layers]
    weights = sum(count for count, _ in counted)
    return sum(count * bits for count, bits in counted) / weights if weights else None


def saved_bytes(layers: Iterable[LayerEntry]) -> float:
    """Count the stored bytes saved by the quantized layers against 16 bits."""
    return sum(prod(layer.shape) * (2 - layer.bits_per_weight / 8) for layer in layers)


def folder_of(export: str) -> str:
    """Return the folder of an exporter in a bundle: `model`, `engine`, `onnx`."""
    return load_exporter(export).place


def weight_bytes(files: Iterable[FileEntry], *, folder: str = "model") -> int:
    """Count bytes of the weight files under one folder of a bundle (`model`, `onnx`, ...): of one export."""
    # an engine has weights of its own: the graph that it is built from stays behind
    roles = {"engine"} if folder == "engine" else {"weights", "onnx", "gguf", "openvino"}
    return sum(file.bytes for file in files if file.path.startswith(f"{folder}/") and file.role in roles)


def read_rows(ways: Mapping[str, float], *, subject: str, folder: str) -> list[Row]:
    """Return `size.bytes_read`: bytes read by each way to multiply, for an export with two."""
    how: dict[str, dict[str, Any]] = {way: {"export": folder, "way": way} for way in ways}
    return [Row(name="size.bytes_read", value=ways[way], subject=subject, settings=how[way], **_BYTES) for way in ways]


def size_rows(
    layers: Iterable[LayerEntry],
    files: Iterable[FileEntry],
    *,
    subject: str,
    baseline: str | None = None,
    baseline_bytes: int | None = None,
    folder: str = "model",
) -> list[Row]:
    """Return `size.bytes` and `size.bits_per_weight` of one export; `baseline_bytes`: of the original source."""
    size = weight_bytes(files, folder=folder)
    against = None
    if baseline is not None and baseline_bytes is not None:
        against = Baseline(subject=baseline, value=baseline_bytes, ratio=baseline_bytes / size if size else None)
    bits = bits_per_weight(layers)
    flags = [] if bits is not None else ["no-quantized-layer"]
    average: dict[str, Any] = {"unit": "bit", "stat": "mean", "better": "lower", "flags": flags}
    return [
        Row(name="size.bytes", value=size, subject=subject, baseline=against, settings={"export": folder}, **_BYTES),
        Row(name="size.bits_per_weight", value=bits, subject=subject, **average),
    ]
