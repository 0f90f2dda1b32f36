"""As much of protobuf as single products need, for where the package onnx is not.

A message is its fields one after another, each a number, how it is written, and a value; of a message inside of another
that comes twice the fields are joined, so that a model is what was written of it in any order
(https://protobuf.dev/programming-guides/encoding). Numbers of fields: onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Chunks = list[bytes]


def number(field: int, value: int) -> Chunks:
    """A field that is a number, not below zero."""
    return [_varint(field << 3 | _VARINT) + _varint(value)]


def text(field: int, value: str) -> Chunks:
    """A field that is a text."""
    return message(field, [value.encode()])


def message(field: int, parts: Sequence[bytes]) -> Chunks:
    """A field that is a message, or bytes: parts that follow each other, none of which is copied."""
    return [_varint(field << 3 | _BYTES) + _varint(sum(map(len, parts))), *parts]


def inside(data: int | bytes | memoryview, *path: int) -> Iterator[int | memoryview]:
    """What stands in a message, written whole, at a path of fields; of what has a fixed size the bytes."""
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
    """Of a field that holds several: written one by one, or packed."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        one, at = _read(value, at)
        found.append(one)
    return found


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _read(view: memoryview, at: int) -> tuple[int, int]:
    """(a number, where it ends)."""
    value = shift = 0
    while True:
        value |= (view[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if not view[at - 1] & 128:
            return value, at
