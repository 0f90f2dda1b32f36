"""Mutants of a file: of its bytes, of the tree that its JSON or YAML is, of numbers that a binary format stores."""

import copy
import json
import random
import struct
from typing import Any

INTEGERS = (0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = (
    "", " ", "null", "../../etc/passwd", "/dev/zero", "a" * 300, "\u0000", "\ud800", "\u202e", "NaN", "1e999", "-0",
    "!!bool maybe", "!!python/object/apply:os.system [id]", "%s%n", "{{ 7 * 7 }}", "\x1b[2J", "é" * 40, "🙂",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *INTEGERS, *WORDS, 10**40, 10**400, 0.5, -1e308, float("nan"), float("inf"), True, False, None, [], {}, [[]],
    [None], {"": None}, [0] * 50,
)  # fmt: skip


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four small changes of bytes."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(9)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << rng.randrange(8)
        elif kind == 1 and made:
            made[at % len(made)] = rng.randrange(256)
        elif kind == 2:
            made[at : at + rng.choice((1, 2, 8, 64))] = b""
        elif kind == 3:
            made[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))
        elif kind == 4:
            del made[at:]
        elif kind == 5:
            other = rng.randrange(len(made) + 1)
            made[at:at] = made[other : other + rng.choice((4, 16, 128))]
        elif kind == 6:
            form, size = rng.choice((("<I", 4), ("<Q", 8), (">I", 4), ("<H", 2)))
            number = rng.choice(INTEGERS) % (1 << 8 * size)
            at -= at % size
            made[at : at + size] = struct.pack(form, number)
        elif kind == 7:
            made[at : at + 8] = rng.choice(WORDS).encode("utf-8", "surrogatepass")[:64]
        else:
            other = rng.randrange(len(made) + 1)
            low, high = sorted((at, other))
            made[low:high] = made[low:high] * rng.choice((2, 3)) if high - low < 4096 else b""
    return bytes(made)


def of_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of a document with one to three of its values changed, dropped, doubled, nested or renamed."""
    made = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(made))
        if not places:
            return copy.deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 3:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other, there = rng.choice(places)
            holder[key] = copy.deepcopy(other[there]) if there in other or isinstance(other, list) else None
        elif kind == 5:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
        elif kind == 6 and isinstance(holder, dict):
            holder[rng.choice(WORDS)] = holder.pop(key)
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((-1, 2, 0, 1000)) + rng.choice((0, 1, -1))
        elif isinstance(holder[key], str):
            holder[key] = holder[key] + rng.choice(WORDS)
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return made


def of_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document (which YAML takes too), changed as a tree three times in four, else in its bytes."""
    if rng.random() < 0.25:
        return of_bytes(data, rng)
    changed = of_tree(json.loads(data), rng)
    return json.dumps(changed, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """JSON lines: one of them changed."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = of_json(lines[place], rng) if lines[place] else of_bytes(lines[place], rng)
    return b"\n".join(lines)


def of_graph(data: bytes, rng: random.Random) -> bytes:
    """An ONNX file: one or two of its operators' numbers, or of the sizes of its inputs and weights, are others."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    sizes = [(tensor.dims, at) for tensor in graph.initializer for at in range(len(tensor.dims))]
    sizes += [(dim, "dim_value") for each in graph.input for dim in each.type.tensor_type.shape.dim if dim.dim_value]
    kinds = {onnx.AttributeProto.INT: "i", onnx.AttributeProto.FLOAT: "f"}
    given = [(each, kinds[each.type]) for node in graph.node for each in node.attribute if each.type in kinds]
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(given if rng.random() < 0.7 else sizes)
        before = holder[key] if isinstance(key, int) else getattr(holder, key)
        number: Any = rng.choice((*INTEGERS, -(2**31), 2**32, 2**60, -(2**63))) + rng.choice((0, int(before)))
        number = (number + 2**63) % 2**64 - 2**63
        if key == "f":
            number = rng.choice((float("nan"), float("inf"), -float("inf"), 1e38, 0.0, -1.0))
        if isinstance(key, int):
            holder[key] = number
        else:
            setattr(holder, key, number)
    return bytes(model.SerializeToString())


def of_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its header as a tree, with the length that fits it, or not."""
    if rng.random() < 0.4:
        return of_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = of_json(data[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice(INTEGERS) % (1 << 64)
    return stated.to_bytes(8, "little") + header + data[8 + length :]


def _places(tree: Any) -> Any:
    """(container, key) of everything in a tree; what is deep is as likely as what is not."""
    stack = [tree]
    while stack:
        holder = stack.pop()
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, value in list(pairs):
            yield holder, key
            if isinstance(value, dict | list):
                stack.append(value)
