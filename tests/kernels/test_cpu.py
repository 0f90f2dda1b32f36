"""Operators for CPUs: against ONNX Runtime's own nodes, and against the arithmetic written out in float64."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit import machine
from quantkit.errors import InputError
from quantkit.kernels.cpu import library

Array = NDArray[Any]

pytestmark = pytest.mark.skipif(library._compiler() is None, reason="no C compiler is installed")


# in the child of `test_sanitizers_have_nothing_to_say`
SANITIZED = tuple(os.environ.get("QUANTKIT_TESTS_SANITIZED", "").split())


def operators() -> Path:
    """The library for this processor."""
    return library.library(("-march=native", *SANITIZED))


@pytest.fixture(params=["native", "portable"])
def compiled(request: pytest.FixtureRequest) -> Path:
    """The library for this processor, and the one that any has."""
    return operators() if request.param == "native" else library.library(SANITIZED)


class Weight:
    """A random weight [rows, columns] as MatMulNBits stores it."""

    def __init__(
        self, rows: int, columns: int, group: int, *, seed: int, zeros: bool = True, half: bool = True
    ) -> None:
        draw = np.random.default_rng(seed)
        self.rows, self.columns, self.group = rows, columns, group
        groups = -(-columns // group)
        self.codes = draw.integers(0, 16, (rows, groups * group))
        self.zero = draw.integers(0, 16, (rows, groups)) if zeros else np.full((rows, groups), 8)
        self.scale = draw.uniform(0.001, 0.02, (rows, groups)).astype(np.float16 if half else np.float32)
        packed = (self.codes[:, ::2] | self.codes[:, 1::2] << 4).astype(np.uint8)
        wide = np.pad(self.zero, ((0, 0), (0, groups % 2)))
        self.parts = [packed.reshape(rows, groups, group // 2), self.scale.astype(np.float32)]
        self.parts += [(wide[:, ::2] | wide[:, 1::2] << 4).astype(np.uint8)] if zeros else []

    @property
    def floats(self) -> Array:
        """[rows, groups · group] in float64."""
        whole = (self.codes.reshape(*self.zero.shape, -1) - self.zero[..., None]) * self.scale[..., None].astype(float)
        return whole.reshape(self.rows, -1)

    def times(self, x: Array) -> Array:
        """x @ weightᵀ in float64, x rounded to 8 bits in groups, as level 4 rounds it."""
        groups = self.zero.shape[1]
        wide = np.pad(x.astype(np.float64), ((0, 0), (0, groups * self.group - self.columns)))
        parts = wide.reshape(len(x), groups, self.group)
        step = np.abs(parts).max(axis=2, keepdims=True) / 127
        rounded = np.rint(parts / np.where(step, step, 1)) * step
        return np.asarray(rounded.reshape(len(x), -1) @ self.floats.T)


def session(node: onnx.NodeProto, constants: dict[str, Array], inputs: dict[str, Array], lib: Path | None) -> Any:
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output if name]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "one", floats, outputs, stored)
    domains = [
        helper.make_opsetid(name, version) for name, version in (("", 21), ("com.microsoft", 1), ("quantkit", 1))
    ]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.enable_cpu_mem_arena = False  # else what lies beside a tensor is some other one
    if lib is not None:
        options.register_custom_ops_library(str(lib))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    kind: str, weights: Sequence[Weight], lib: Path | None, x: Array, outputs: Sequence[str] = ("y",), **beside: Array
) -> list[Array]:
    """A node `Product` or `GatedMlp`."""
    names, constants, sizes = [], {}, {}
    for at, weight in enumerate(weights):
        after = "_after" if at else ""
        sizes |= {f"rows{after}": weight.rows, f"columns{after}": weight.columns, f"group{after}": weight.group}
        given = {f"{part}{at}": array for part, array in zip(("codes", "scales", "zeros"), weight.parts, strict=False)}
        constants |= given
        names += [*given, *[""] * (3 - len(given))]
    if kind == "GatedMlp":
        sizes["activation"] = int(beside.pop("activation"))
    given = {name: beside[name] for name in ("skip", "gamma", "bias") if name in beside}
    node = helper.make_node(
        kind,
        ["x", *(name if name in given else "" for name in ("skip", "gamma", "bias")), *names],
        list(outputs),
        domain="quantkit",
        epsilon=1e-5,
        **sizes,
    )
    feeds = {"x": x, **given}
    found: list[Array] = session(node, constants, feeds, lib).run(None, feeds)
    return found


def close(found: Array, expected: Array) -> bool:
    return float(np.abs(found - expected).max()) <= 2e-5 * float(np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 21])
@pytest.mark.parametrize(
    ("height", "columns", "group", "zeros", "half"),
    [(96, 192, 64, True, True), (33, 160, 32, True, False), (50, 100, 16, False, True), (16, 256, 128, False, False)],
)
def test_a_product_is_what_its_rounded_inputs_give(
    compiled: Path, rows: int, height: int, columns: int, group: int, zeros: bool, half: bool
) -> None:
    weight = Weight(height, columns, group, seed=rows, zeros=zeros, half=half)
    x = np.random.default_rng(7).normal(size=(rows, columns)).astype(np.float32)
    (found,) = run("Product", [weight], compiled, x)
    assert close(found, weight.times(x))


@pytest.mark.skipif("avx512_vnni" not in machine.isa_features(), reason="level 4 rounds otherwise elsewhere")
def test_a_product_is_that_of_matmulnbits(compiled: Path) -> None:
    weight = Weight(96, 192, 64, seed=3)
    x = np.random.default_rng(7).normal(size=(5, 192)).astype(np.float32)
    names = ["codes", "scales", "zeros"]
    node = helper.make_node(
        "MatMulNBits",
        ["x", *names],
        ["y"],
        domain="com.microsoft",
        K=192,
        N=96,
        bits=4,
        block_size=64,
        accuracy_level=4,
    )
    (theirs,) = session(node, dict(zip(names, weight.parts, strict=True)), {"x": x}, None).run(None, {"x": x})
    assert close(run("Product", [weight], compiled, x)[0], theirs)


def test_sum_norm_and_bias_are_part_of_a_product(compiled: Path) -> None:
    draw = np.random.default_rng(5)
    weight = Weight(40, 96, 32, seed=5)
    x, skip = draw.normal(size=(2, 2, 3, 96)).astype(np.float32)
    gamma, bias = draw.normal(size=96).astype(np.float32), draw.normal(size=40).astype(np.float32)
    y, total = run("Product", [weight], compiled, x, ("y", "sum"), skip=skip, gamma=gamma, bias=bias)
    assert np.array_equal(total, x + skip)
    wide = (x.astype(float) + skip).reshape(6, 96)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gamma
    # a code may fall to the other side of a half
    assert np.abs(y.reshape(6, 40) - (weight.times(normed) + bias)).max() < 0.02
    (alone,) = run("Product", [weight], compiled, x, skip=skip, gamma=gamma, bias=bias)
    assert np.array_equal(alone, y)


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_gated_mlp_equals_the_reference(compiled: Path, activation: int, rows: int) -> None:
    first, second = Weight(128, 96, 32, seed=1), Weight(48, 64, 32, seed=2)
    x = 20 * np.random.default_rng(7).normal(size=(rows, 96)).astype(np.float32)
    x[1:2] = 0
    (found,) = run("GatedMlp", [first, second], compiled, x, activation=np.array(activation))
    gate, up = np.split(first.times(x), 2, axis=1)
    inner = gate if activation == 0 else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    hidden = gate / (1 + np.exp(-np.clip(inner, -80, 80))) * up
    expected = second.times(hidden.astype(np.float32))
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
    assert np.all(found[1:2] == 0)


@pytest.mark.parametrize("strange", [[np.nan], [np.inf], [-np.inf], [np.inf, np.inf], [np.inf, -np.inf], [3e38]])
def test_what_is_no_number_or_infinite_is_as_in_a_product_of_floats(compiled: Path, strange: list[float]) -> None:
    weight, draw = Weight(41, 100, 16, seed=5), np.random.default_rng(3)
    x = draw.normal(size=(13, 100)).astype(np.float32)
    for row in x[1:]:  # in one group, and where there are two in several as well
        row[draw.permutation(16 if row[0] > 0 else 100)[: len(strange)]] = strange
    (found,) = run("Product", [weight], compiled, x)
    with np.errstate(invalid="ignore"):
        floats = (x[:, None].astype(float) * weight.floats[None, :, :100]).sum(axis=2)
    whole = np.isfinite(floats)
    assert np.array_equal(found[~whole], floats[~whole].astype(np.float32), equal_nan=True)
    assert np.isfinite(found[whole]).all() and close(found[:1], weight.times(x[:1])) and whole[0].all()


def test_what_is_masked_weighs_nothing_and_what_is_no_number_stays_in_its_row(compiled: Path) -> None:
    """Of scores e^-90 apart; see `attention` for what is padded."""
    clean, spoiled = (attention(compiled, False, 0, True, 9, 0, 0, 0, nan=row)[0] for row in (None, 4))
    others = np.arange(9) != 4
    assert np.isnan(spoiled[4]).all() and np.array_equal(spoiled[others], clean[others])


def attention(
    lib: Path | None,
    packed: bool,
    window: int,
    turned: bool,
    new: int,
    past: int,
    capacity: int,
    pad: int,
    *,
    nan: int | None = None,
    **changed: Any,
) -> list[Array]:
    """Attention of two sequences, the second padded on the left: ours, or GroupQueryAttention without a library.

    Args:
        nan: a query that is no number.
        changed: attributes of ours, or inputs, that are otherwise.
    """
    draw = np.random.default_rng(new + past)
    heads, kv_heads, size, total = 6, 2, 32, past + new
    widths = [heads * size, kv_heads * size, kv_heads * size]
    parts = [draw.normal(size=(2, new, width)).astype(np.float32) for width in widths]
    caches = [np.zeros((2, kv_heads, capacity, size), np.float32) for _ in range(2)]
    for cache in caches:
        cache[:, :, :past] = draw.normal(size=(2, kv_heads, past, size))
    # what is padded has no weight at all
    parts[2][1, : max(pad - past, 0)], caches[1][1, :, : min(pad, past)] = 1e38, 1e38
    if nan is not None:
        parts[0][:, nan] = np.nan
    angles = np.arange(64)[:, None] * 0.7 ** np.arange(size // 2)
    bias = np.zeros((2, 1, new, total), np.float32)
    bias[1, ..., :pad] = -1e4
    feeds: dict[str, Array] = {"q": np.concatenate(parts, axis=2)} if packed else dict(zip("qkv", parts, strict=True))
    feeds |= dict(zip(("past_k", "past_v"), caches, strict=True)) | {"bias": bias}
    if turned:
        feeds |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    whole = {"total": np.array(total, np.int32)}
    feeds, whole = ({name: changed.get(name, array) for name, array in part.items()} for part in (feeds, whole))
    names = {name: name if name in {**feeds, **whole} else "" for name in ("k", "v", "cos", "sin")}
    before = ["q", names["k"], names["v"], "past_k", "past_v"]
    if lib is not None:
        order = [*before, "total", names["cos"], names["sin"], "bias"]
        given = {"heads": heads, "kv_heads": kv_heads, "window": window, "scale": 0.2}
        given |= {name: value for name, value in changed.items() if name in given}
        node = helper.make_node("Attention", order, ["y", "k_now", "v_now"], domain="quantkit", **given)
    else:
        whole["lengths"] = np.full(2, total - 1, np.int32)
        order = [*before, "lengths", "total", names["cos"], names["sin"], "", "bias"]
        given = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": 0.2, "do_rotary": int(turned)}
        given |= {"local_window_size": window} if window else {}
        node = helper.make_node("GroupQueryAttention", order, ["y", "k_now", "v_now"], domain="com.microsoft", **given)
    found: list[Array] = session(node, whole, feeds, lib).run(None, feeds)
    seen = [found[0][0], found[0][1, max(pad - past, 0) :]]
    return [*seen, *(each[:, :, :total] for each in found[1:])]


@pytest.mark.parametrize(("packed", "turned"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    ("new", "past", "capacity", "pad"), [(1, 20, 30, 3), (8, 0, 0, 0), (21, 0, 0, 4), (19, 0, 40, 0), (1, 5, 5, 0)]
)
def test_attention_is_that_of_groupqueryattention(
    compiled: Path, packed: bool, turned: bool, window: int, new: int, past: int, capacity: int, pad: int
) -> None:
    case = (packed, window, turned, new, past, capacity, pad)
    for ours, theirs in zip(attention(compiled, *case), attention(None, *case), strict=True):
        assert np.abs(ours - theirs).max() < 2e-5


# what a wrap would make of an honest number, and others that no honest file has
WRAPS = [-(2**63), -1, 0, 2**31, 2**32 + 2, 2**60 + 6, 2**63 - 1]
BROKEN: list[dict[str, Any]] = [
    *({name: value} for name in ("heads", "kv_heads") for value in WRAPS),
    *({"window": value} for value in WRAPS if value != 0),
    *({"scale": value} for value in (np.nan, np.inf, 1e39)),
    *({"total": np.array(value, np.int32)} for value in (-1, 8, 33, 2**31 - 1)),
    {"total": np.zeros(0, np.int32)},
    *({name: np.zeros((2, 2, 20, size), np.float32)} for name in ("past_k", "past_v") for size in (0, 16, 24)),
    *({"past_k": np.zeros((2, 2, 0, size), np.float32)} for size in (2**40, 2**56)),
    *({name: np.zeros(shape, np.float32)} for name in ("cos", "sin") for shape in [(20, 16), (64, 17), (0, 16)]),
    *({"q": np.zeros(shape, np.float32)} for shape in [(2, 9, 191), (2, 0, 192), (1, 9, 192), (0, 9, 192), (18, 192)]),
    *({"v": np.zeros(shape, np.float32)} for shape in [(2, 9, 63), (2, 1, 64), (2, 0, 64)]),
    *({"bias": np.zeros(shape, np.float32)} for shape in [(2, 1, 9, 28), (3, 1, 9, 29), (2, 2, 9, 29), (0, 1, 9, 29)]),
]


FITS: dict[str, Any] = {"packed": False, "window": 0, "turned": True, "new": 9, "past": 20, "capacity": 20, "pad": 0}


@pytest.mark.parametrize("change", BROKEN, ids=str)
def test_an_attention_that_does_not_fit_together_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"Attention|negative|Failed|overflow|alloc"):
        attention(operators(), **{**FITS, **change})


def test_no_rows_give_none(compiled: Path) -> None:
    (found,) = run("Product", [Weight(40, 96, 32, seed=5)], compiled, np.zeros((0, 96), np.float32))
    assert found.shape == (0, 40)
    (found,) = run("Product", [Weight(40, 96, 32, seed=5)], compiled, np.zeros((3, 0, 1 << 40, 96), np.float32))
    assert found.shape == (3, 0, 1 << 40, 40)
    y, keys, _ = attention(compiled, True, 0, True, 0, 20, 20, 0)[1:]
    assert y.size == 0 and keys.shape == (2, 2, 20, 32) and np.abs(keys).max() > 1


@pytest.mark.thorough
def test_sanitizers_have_nothing_to_say(tmp_path: Path) -> None:
    """All the others, on libraries that end the process at a byte outside, an overflow or an undefined conversion."""
    if SANITIZED:
        return
    compiler = (library._compiler() or [""])[0]
    # the second, since what onnxruntime throws is looked for when the first is loaded
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    places = [subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() for command in asked]
    if not all(Path(place).is_absolute() for place in places):
        pytest.skip(f"{compiler} has no sanitizers that a process can load")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(places),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "QUANTKIT_TESTS_SANITIZED": "-O1 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all",
        "QUANTKIT_CACHE": str(tmp_path),
    }
    # not what is about the file of a library
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:xdist",
        "-k",
        "not librar and not compile",
        __file__,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize(
    "lie",
    [
        *({"rows": 64}, {"columns": 128}, {"group": 0}, {"group": 24}, {"group": 64}, {"rows": 2**60 + 40}),
        *({"columns": -(2**63)}, {"group": 2**32 + 32}, {"columns": 2**63 - 1}),
    ],
    ids=str,
)
def test_a_weight_whose_attributes_contradict_its_tensors_is_refused(lie: dict[str, int]) -> None:
    weight = Weight(40, 96, 32, seed=5)
    for name, value in lie.items():
        setattr(weight, name, value)
    with pytest.raises(Exception, match=r"needs positive sizes|size of its attributes"):
        run("Product", [weight], operators(), np.zeros((1, min(max(weight.columns, 0), 128)), np.float32))


@pytest.mark.parametrize("beside", [{"skip": (1, 96)}, {"gamma": (90,)}, {"bias": (39,)}])
def test_a_skip_norm_or_bias_of_a_wrong_size_is_refused(beside: dict[str, tuple[int, ...]]) -> None:
    given = {name: np.ones(shape, np.float32) for name, shape in beside.items()}
    with pytest.raises(Exception, match="does not match its inputs"):
        run("Product", [Weight(40, 96, 32, seed=5)], operators(), np.zeros((3, 96), np.float32), **given)


def _proved(place: Path, data: bytes) -> None:
    place.write_bytes(data)
    place.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest())


SPOILED: dict[str, Callable[[Path], object]] = {
    "cut short": lambda place: place.write_bytes(place.read_bytes()[:9000]),
    "empty": lambda place: place.write_bytes(b""),
    "gone": lambda place: place.unlink(),
    "a link": lambda place: place.rename(place.with_name("other")) and place.symlink_to(place.with_name("other")),
    "two names": lambda place: os.link(place, place.with_name("another")),
    "others may write": lambda place: place.chmod(0o664),
    "others may write the proof": lambda place: place.with_suffix(".sha256").chmod(0o666),
    "a proof of no text": lambda place: place.with_suffix(".sha256").write_bytes(b"\xff\x00"),
    "a proof without an end": lambda place: os.truncate(place.with_suffix(".sha256"), 1 << 40),
    "an open folder": lambda place: _proved(place, b"planted") or place.parent.chmod(0o777) or place.chmod(0o666),
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_FLAGS", ("-O0", *library._FLAGS[1:]))
    return tmp_path / "cache"


def test_a_library_that_is_not_what_was_tried_is_compiled_again(own_cache: Path) -> None:
    place = library.library(())
    whole, proof = place.read_bytes(), place.with_suffix(".sha256")
    for name, spoil in SPOILED.items():
        spoil(place)
        assert library.library(()) == place, name
        assert not place.is_symlink() and len(place.read_bytes()) > 9000
        assert [stat.S_IMODE(each.stat().st_mode) & 0o022 for each in (place, proof)] == [0, 0]
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700 and place.read_bytes()[:4] == whole[:4]
    before = place.stat().st_mtime_ns
    assert library.library(()).stat().st_mtime_ns == before, "what is whole stays"


def test_a_folder_that_others_can_change_is_refused(own_cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    with pytest.raises(InputError, match=r"kernels-not-compiled.*others may write"):
        library.library(())
    own_cache.chmod(0o1777)
    assert library.library(()).is_file()
    elsewhere = tmp_path / "elsewhere"
    (own_cache / "kernels").rename(elsewhere)
    (own_cache / "kernels").symlink_to(elsewhere)
    with pytest.raises(InputError, match=r"kernels-not-compiled.*a link, or belongs to another"):
        library.library(())
    (own_cache / "kernels").unlink()
    (tmp_path / "link").symlink_to(own_cache)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "link"))
    assert library.library(()).is_relative_to(own_cache), "a cache that lies elsewhere is one's own"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match=r"kernels-not-compiled.*belongs to another"):
        library.library(())


def test_processes_that_want_it_at_once_compile_it_once(own_cache: Path, tmp_path: Path) -> None:
    wrapper = _compiler(tmp_path, f'echo once >> {tmp_path}/log; sleep 1; exec gcc -O0 "$@"')
    code = "from quantkit.kernels.cpu import library; print(library.library(()))"
    environment = {**os.environ, "CC": str(wrapper), "QUANTKIT_CACHE": str(own_cache)}
    both = [subprocess.Popen(machine.python("-c", code), env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    places = {process.communicate()[0] for process in both}
    assert len(places) == 1 and b"operators.so" in places.pop()
    assert (tmp_path / "log").read_text() == "once\n"


def _compiler(folder: Path, script: str) -> Path:
    path = folder / "my cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# where a compiler is to write
_TO = 'while [ "$1" != -o ]; do shift; done; to=$2'


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo 'error: no' >&2; exit 1", "error: no"),
        ("printf 'a\\377\\033[2Jb' >&2; exit 1", "a"),
        ("exit 0", "without a library"),
        (f"{_TO}; ln -s /bin/sh $to", "without a library"),
        (f"{_TO}; : > $to", "too short"),
        (f"{_TO}; head -c 3000 /bin/sh > $to", "exit code|rror"),
        (f"{_TO}; echo | exec gcc -shared -fPIC -x c - -o $to", "RegisterCustomOps"),
        ("sleep 60", "not done after 2 s"),
        ("exec yes >&2", "y;"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_compiler_that_fails_is_one_line(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, script: str, answer: str
) -> None:
    monkeypatch.setenv("CC", str(_compiler(tmp_path, script)))
    monkeypatch.setattr(library, "_SECONDS", 2.0)
    with pytest.raises(InputError, match="kernels-not-compiled") as met:
        library.library(())
    assert re.search(answer, met.value.line()) and met.value.line().isprintable() and not list(own_cache.rglob("*.so"))
    assert not list(own_cache.rglob("*.sha256"))


@pytest.mark.parametrize("asked", ["/nonexistent/gcc -O1", 'gcc "'])
def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("CC", asked)
    with pytest.raises(InputError, match="compiler-missing") as met:
        library.library()
    assert asked.split(maxsplit=1)[0] in met.value.value and "CC" in str(library.why_not() or "CC")


def test_a_library_that_onnxruntime_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "library", lambda: tmp_path / "none.so")
    with pytest.raises(InputError, match="kernels-not-compiled"):
        library.register(onnxruntime.SessionOptions())
