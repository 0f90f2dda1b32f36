"""Minimal protobuf, for graphs of one product and a check before a file is opened, without the package onnx.

A message is a sequence of fields in any order; each has a number, a wire type and a value
(https://protobuf.dev/programming-guides/encoding). Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Chunks = list[bytes]
# field numbers of onnx.proto
_GRAPH, _FUNCTIONS, _NODE, _FUNCTION_NODE, _OPERATOR, _ATTRIBUTE = 7, 25, 1, 7, 4, 5
_NAME, _NUMBER, _INNER, _INNERS = 1, 3, 6, 11
# attributes that may exceed 32 bits: "to the end", any constant, a seed
_WIDE = {b"start", b"end", b"value_int", b"seed"}


def number(field: int, value: int) -> Chunks:
    """Return a field with a number, not below zero."""
    return [_varint(field << 3 | _VARINT) + _varint(value)]


def text(field: int, value: str) -> Chunks:
    """Return a field with a text."""
    return message(field, [value.encode()])


def message(field: int, parts: Sequence[bytes]) -> Chunks:
    """Return a field with a message, or bytes, as its parts; none of them is copied."""
    return [_varint(field << 3 | _BYTES) + _varint(sum(map(len, parts))), *parts]


def inside(data: int | bytes | memoryview, *path: int) -> Iterator[int | memoryview]:
    """Yield the values at a path of fields in a serialized message; those of a fixed size as bytes."""
    if isinstance(data, int):
        return
    for field, value in _fields(memoryview(data)):
        if field == path[0]:
            yield from inside(value, *path[1:]) if path[1:] else [value]


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(view):
        key, at = _read(view, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read(view, at)
            yield key >> 3, value
            continue
        size, at = _read(view, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[kind], at)
        yield key >> 3, view[at : at + size]
        at += size


def numbers(value: int | memoryview) -> list[int]:
    """Return the numbers of a repeated field, packed or not."""
    if isinstance(value, int):
        return [value]
    values, at = [], 0
    while at < len(value):
        one, at = _read(value, at)
        values.append(one)
    return values


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _read(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number and the position behind it."""
    value = shift = 0
    while True:
        value |= (view[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if not view[at - 1] & 128:
            return value, at


def demand_attributes(path: Path) -> None:
    """Refuse a graph with an attribute beyond 32 bits: ONNX Runtime would compute with its lower half.

    A `kv_num_heads` of 2^32 would divide by zero there.

    Raises:
        ValueError: for such an attribute, with its name, or if the file is no protobuf.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as stream:
        whole = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        for nodes in (inside(whole, _GRAPH, _NODE), inside(whole, _FUNCTIONS, _FUNCTION_NODE)):
            for node in nodes:
                _demand_narrow(node)
    except (IndexError, KeyError):
        raise ValueError("not a complete protobuf") from None


def _demand_narrow(node: int | memoryview) -> None:
    for attribute in inside(node, _ATTRIBUTE):
        for value in inside(attribute, _NUMBER):
            signed = (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)  # type: ignore[arg-type]
            names = [bytes(name) for name in inside(attribute, _NAME)]  # type: ignore[arg-type]
            if not -(1 << 31) <= signed < 1 << 31 and not set(names) <= _WIDE:
                kinds = [*inside(node, _OPERATOR), *inside(attribute, _NAME)]
                called = ".".join(bytes(kind).decode(errors="replace") for kind in kinds)  # type: ignore[arg-type]
                raise ValueError(f"{called} is {signed}, beyond 32 bits")
        for inner in (*inside(attribute, _INNER, _NODE), *inside(attribute, _INNERS, _NODE)):
            _demand_narrow(inner)
