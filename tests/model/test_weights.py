"""Hostile and honest safetensors files, made by hand."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError, QuantkitError, Stopped
from quantkit.model.source.weights import (
    HEADER_LIMIT,
    Weights,
    dtype_name,
    torch_dtype,
    write_atomic,
    write_safetensors,
)


def craft(path: Path, header: Any, data: bytes) -> None:
    """A file with that header (JSON text, or what is to become it) and that data, whatever they claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def claim(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


HOSTILE: dict[str, tuple[Any, bytes, str]] = {
    "header is no JSON": (b"{nonsense", b"", "weights-header"),
    "header is a list": ([1, 2], b"", "weights-header"),
    "header is no UTF-8": (b'{"\xff": 1}', b"", "weights-header"),
    "header nests without end": (b"[" * 200_000, b"", "weights-header"),
    "metadata holds numbers": ({"__metadata__": {"a": 1}}, b"", "weights-header"),
    "key twice": (b'{"a":%s,"a":%s}' % ((json.dumps(claim(0, 4)).encode(),) * 2), b"1234", "weights-duplicate"),
    "key twice in an entry": (b'{"a":{"dtype":"F32","dtype":"F32"}}', b"1234", "weights-duplicate"),
    "entry is a number": ({"a": 3}, b"", "weights-header"),
    "entry has a key too many": ({"a": {**claim(0, 4), "b": 1}}, b"1234", "weights-header"),
    "entry lacks its shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "weights-header"),
    "shape holds a float": ({"a": claim(0, 4, shape=[1.0])}, b"1234", "weights-header"),  # type: ignore[list-item]
    "shape holds a boolean": ({"a": claim(0, 4, shape=[True])}, b"1234", "weights-header"),
    "shape is negative": ({"a": claim(0, 4, shape=[-1, -1])}, b"1234", "weights-header"),
    "offsets run backwards": ({"a": {**claim(0, 4), "data_offsets": [4, 0]}}, b"1234", "weights-header"),
    "offsets are negative": ({"a": {**claim(0, 4), "data_offsets": [-4, 0]}}, b"1234", "weights-header"),
    "dtype does not exist": ({"a": claim(0, 4, dtype="F33")}, b"1234", "weights-dtype"),
    "dtype is a list": ({"a": {**claim(0, 4), "dtype": ["F32"]}}, b"1234", "weights-dtype"),
    "dtype lies": ({"a": claim(0, 4, dtype="F16", shape=[1])}, b"1234", "weights-shape"),
    "shape lies": ({"a": claim(0, 4, shape=[2])}, b"1234", "weights-shape"),
    "shape overflows 64 bits": ({"a": claim(0, 4, shape=[2**62, 4])}, b"1234", "weights-shape"),
    "two tensors overlap": ({"a": claim(0, 8), "b": claim(4, 12)}, b"1234" * 3, "weights-overlap"),
    "two tensors are one": ({"a": claim(0, 4), "b": claim(0, 4)}, b"1234", "weights-overlap"),
    "bytes between tensors": ({"a": claim(0, 4), "b": claim(8, 12)}, b"1234" * 3, "weights-gap"),
    "data does not begin at 0": ({"a": claim(4, 8)}, b"1234" * 2, "weights-gap"),
    "data is cut off": ({"a": claim(0, 8)}, b"1234", "weights-truncated"),
    "bytes after the last tensor": ({"a": claim(0, 4)}, b"12345", "weights-trailing"),
    "no tensors, but data": ({}, b"1", "weights-trailing"),
    "name is a path": ({"../../etc/passwd": claim(0, 4)}, b"1234", "weights-name"),
    "name is an absolute path": ({"/a": claim(0, 4)}, b"1234", "weights-name"),
    "name is a Windows path": ({"a\\b": claim(0, 4)}, b"1234", "weights-name"),
    "name has an empty part": ({"a..b": claim(0, 4)}, b"1234", "weights-name"),
    "name holds NUL": ({"a\0b": claim(0, 4)}, b"1234", "weights-name"),
    "name holds a line end": ({"a\nb": claim(0, 4)}, b"1234", "weights-name"),
    "name is empty": ({"": claim(0, 4)}, b"1234", "weights-name"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_gets_one_clear_line(case: str, tmp_path: Path) -> None:
    header, data, code = HOSTILE[case]
    craft(tmp_path / "model.safetensors", header, data)
    with pytest.raises(InputError) as caught:
        Weights.open(tmp_path)
    assert caught.value.code == code
    assert caught.value.where.startswith("model.safetensors")
    line = caught.value.line()
    assert "\n" not in line and "\0" not in line and len(line) < 600


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "weights-empty"),
        (b"123", "weights-header"),
        ((0).to_bytes(8, "little"), "weights-header"),
        ((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}", "weights-header"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "weights-header"),
        ((100).to_bytes(8, "little") + b"{}", "weights-truncated"),
        (b"<html>404 not found</html>", "weights-header"),
    ],
)
def test_a_file_whose_length_lies(content: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert refused(tmp_path) == code


def refused(folder: Path) -> str:
    """The code by which a folder's weights are refused."""
    with pytest.raises(InputError) as caught:
        Weights.open(folder)
    return caught.value.code


ODD = {
    "half": torch.randn(3, 5).half(),
    "scalar": torch.tensor(2.5),
    "brain": torch.randn(7, 1).bfloat16(),
    "nothing": torch.empty(0, 4),
    "single": torch.randn(17),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "long": torch.arange(3),
    "eight": torch.randn(3).to(torch.float8_e4m3fn),
}


def as_headers(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    save_file(ODD, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    assert set(weights.entries) == set(ODD)
    for name, tensor in ODD.items():
        read = weights.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert weights.total_bytes() == sum(tensor.nbytes for tensor in ODD.values())


def test_the_reference_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    asked: list[str] = []

    def produce(name: str) -> torch.Tensor:
        asked.append(name)
        return ODD[name]

    sha256 = write_safetensors(path, as_headers(ODD), produce)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    back = load_file(path)
    assert set(back) == set(ODD)
    for name, tensor in ODD.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    shutil.move(path, tmp_path / "model.safetensors")
    entries = Weights.open(tmp_path).entries
    assert list(entries) == asked  # written in the order asked for
    assert all(entry.start % torch_dtype(entry.dtype).itemsize == 0 for entry in entries.values())


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    hashes = {write_safetensors(tmp_path / name, as_headers(ODD), ODD.__getitem__) for name in ("a", "b")}
    assert len(hashes) == 1


def test_a_strided_tensor_is_written_in_its_logical_order(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).T
    write_safetensors(tmp_path / "model.safetensors", [("w", "F32", (4, 3))], lambda _: turned)
    assert torch.equal(Weights.open(tmp_path).read("w"), turned)


def test_one_element_of_a_column_is_written(tmp_path: Path) -> None:
    column = torch.arange(6.0).reshape(3, 2)[1:2, :1]
    assert column.is_contiguous() and column.t().stride(-1) != 1
    write_safetensors(tmp_path / "model.safetensors", [("w", "F32", (1, 1))], lambda _: column.t())
    assert Weights.open(tmp_path).read("w").item() == 2.0


def test_a_tensor_that_is_not_what_its_header_says_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the header says F32"):
        write_safetensors(tmp_path / "x", [("w", "F32", (2,))], lambda _: torch.zeros(3))
    with pytest.raises(ValueError, match="given twice"):
        write_safetensors(tmp_path / "x", [("w", "F32", (2,))] * 2, lambda _: torch.zeros(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, Stopped, "disk-full"),
        (errno.EDQUOT, Stopped, "disk-full"),
        (errno.EROFS, InputError, "not-writable"),
        (errno.EACCES, InputError, "not-writable"),
    ],
)
def test_a_disk_that_refuses_leaves_the_old_file_whole(
    number: int, kind: type[QuantkitError], code: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise OSError(number, "simulated")

    with pytest.raises(kind) as caught:
        write_atomic(path, chunks())
    assert caught.value.code == code
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    damaged = torch.zeros(5, 7, dtype=dtype)
    damaged[3, 4] = value
    save_file({"fine": torch.ones(2), "damaged": damaged}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    assert torch.equal(weights.read("fine"), torch.ones(2))
    with pytest.raises(InputError) as caught:
        weights.read("damaged")
    assert caught.value.code == "weights-nonfinite" and "damaged" in caught.value.where
    assert re.search(r"(1 NaN and 0|0 NaN and 1) infinite of 35", caught.value.value)


def test_one_pass_hashes_a_file_and_finds_its_largest_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: tensor for name, tensor in ODD.items() if tensor.is_floating_point()}
    parts["long"] = torch.linspace(-3, 2, 700_001)
    parts["wide"] = torch.cat([torch.zeros(900_000), torch.tensor([-7.5])]).bfloat16()
    file = tmp_path / "model.safetensors"
    save_file({**parts, "codes": torch.full((3,), 9, dtype=torch.int8)}, file)
    apart = Weights.open(tmp_path).largest([*parts, "codes"])
    assert apart == {
        **{name: float(value.float().abs().max()) if value.numel() else 0.0 for name, value in parts.items()},
        "codes": 0.0,
    }
    weights = Weights.open(tmp_path)
    assert weights.hashed(file.name) == hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr("quantkit.model.source.weights._looked_at", None)  # nothing is read again
    monkeypatch.setattr("quantkit.model.source.weights._check_finite", None)  # nor looked at, when it is
    assert weights.largest(apart) == apart
    assert torch.equal(weights.read("wide"), parts["wide"])


def test_one_pass_leaves_the_error_to_whoever_uses_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"fine": torch.ones(2), "damaged": torch.tensor([1.0, float("nan"), 2.0])}, file)
    weights = Weights.open(tmp_path)
    assert weights.hashed(file.name) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert weights.largest(["fine"]) == {"fine": 1.0}
    with pytest.raises(InputError, match=r"weights-nonfinite.*damaged.*1 NaN"):
        weights.largest(["fine", "damaged"])
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(InputError, match="weights-truncated"):
        weights.hashed(file.name)


def test_the_largest_finite_values_are_fine(tmp_path: Path) -> None:
    extremes = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    save_file({"w": extremes}, tmp_path / "model.safetensors")
    assert torch.equal(Weights.open(tmp_path).read("w"), extremes)


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(InputError, match=r"\[weights-truncated\]"):
        weights.read("w")


def test_same_compares_bits(tmp_path: Path) -> None:
    a = torch.randn(3, 4)
    save_file({"a": a, "b": a.clone(), "c": a + 1, "d": a.reshape(4, 3).clone()}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    assert weights.same("a", "b") and not weights.same("a", "c") and not weights.same("a", "d")


def shards(folder: Path) -> dict[str, str]:
    """Two shards and their index; the weight map, to be spoilt."""
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": torch.ones(2), "c": torch.ones(3)}, folder / one)
    save_file({"b": torch.full((2, 2), 2.0)}, folder / two)
    weight_map = {"a": one, "b": two, "c": one}
    index(folder, weight_map)
    return weight_map


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_one_set_of_weights(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    weights = Weights.open(tmp_path)
    assert weights.shards == [weight_map["a"], weight_map["b"]]
    assert {name: entry.shard for name, entry in weights.entries.items()} == weight_map
    assert torch.equal(weights.read("b"), torch.full((2, 2), 2.0))


# what becomes of the second shard, or of the index; `ONE` is the first shard
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("missing", "weights-missing-shard"),
        ("empty", "weights-empty"),
        ("link", "weights-outside"),
        ("pipe", "weights-missing-shard"),
        ({"b": "../outside.safetensors"}, "weights-outside"),
        ({"b": "OUTSIDE"}, "weights-outside"),
        ({"b": "pytorch_model.bin"}, "weights-index"),
        ({"b": "ONE"}, "weights-index"),
        ({"c": None}, "weights-index"),
        ({"d": "ONE"}, "weights-index"),
        ('{"weight_map": {"a": 1}}', "weights-index"),
        ("{", "weights-index"),
        ('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "weights-duplicate"),
    ],
)
def test_a_spoilt_set_of_shards(spoil: str | dict[str, str | None], code: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    folder.mkdir()
    weight_map = shards(folder)
    shard = folder / weight_map["b"]
    if isinstance(spoil, dict):
        save_file({"b": torch.ones(1)}, outside)
        places = {"ONE": weight_map["a"], "OUTSIDE": str(outside)}
        changed = weight_map | {name: places.get(place, place) for name, place in spoil.items() if place}
        index(folder, {name: place for name, place in changed.items() if spoil.get(name, "") is not None})
    elif spoil.startswith("{"):
        (folder / "model.safetensors.index.json").write_text(spoil)
    else:
        shutil.move(shard, outside)
        if spoil == "empty":
            shard.write_bytes(b"")
        elif spoil == "link":
            shard.symlink_to(outside)
        elif spoil == "pipe":
            os.mkfifo(shard)
    assert refused(folder) == code


def test_a_hub_cache_may_link_to_its_blobs_and_nowhere_else(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "f00")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/f00"))
    assert torch.equal(Weights.open(snapshot).read("w"), torch.ones(2))

    shutil.move(blobs / "f00", tmp_path / "f00")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "f00")
    assert refused(snapshot) == "weights-outside"


def test_a_folder_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "real" / "model.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "w" in Weights.open(tmp_path / "link").entries


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_weights_are_not_touched(name: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save(Bomb(), tmp_path / name)
    with pytest.raises(InputError) as caught:
        Weights.open(tmp_path)
    assert caught.value.code == "weights-pickle" and name in caught.value.value
    assert "safetensors" in caught.value.remedy
    assert not (tmp_path / "exploded").exists()


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert refused(tmp_path) == "weights-absent"


def test_reading_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """32 tensors of 4 MB: reading them one by one never holds more than one (plus the allocator's slack)."""
    path = tmp_path / "model.safetensors"
    headers = [(f"w{i}", "F32", (1024, 1024)) for i in range(32)]
    write_safetensors(path, headers, lambda name: torch.full((1024, 1024), float(name[1:])))
    code = (
        "import resource, sys, torch; from pathlib import Path; from quantkit.model.source.weights import Weights\n"
        "weights = Weights.open(Path(sys.argv[1])); weights.read('w0')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in weights.entries: assert weights.read(name)[0, 0] == float(name[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    run = forked.run("-c", code, tmp_path, check=True)
    assert int(run.stdout) < 32_000  # kB; all of them are 128 MB, and pages that a fork shares are counted too
