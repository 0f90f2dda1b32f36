"""The reload check of `onnx/`: every fault that is planted is found, and nothing else is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_onnx import EXPORT, Small, export, kept, scheme

from quantkit.exporters.check import largest
from quantkit.exporters.onnx import check as check_onnx

pytestmark = pytest.mark.usefixtures("one_thread")

SOUND = ["onnx.valid", "onnx.operators", "onnx.contained", "reload.onnxruntime"]
DATA = "model.onnx.data"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """int4 in groups with zero points, level 4 in the file."""
    return export(tmp_path_factory.mktemp("good"), "llama", scheme())


@pytest.fixture
def small(good: Small, tmp_path: Path) -> Small:
    return kept(good, tmp_path / "b")


def edit(small: Small, change: Callable[[Any], Any]) -> None:
    """Change the graph's description; the data file stays."""
    model = small.proto()
    change(model)
    (small.onnx / "model.onnx").write_bytes(model.SerializeToString())


def spoil(small: Small, name: str, change: Callable[[Any], None]) -> None:
    """Change a tensor's values in place, in the data file or, where it is small, in the graph itself."""
    model = small.proto()
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    said = {entry.key: entry.value for entry in tensor.external_data}
    data = bytearray((small.onnx / DATA).read_bytes()) if said else bytearray(tensor.raw_data)
    start, length = int(said.get("offset", 0)), int(said.get("length", len(data)))
    values = np.frombuffer(bytes(data[start : start + length]), dtype).reshape(tuple(tensor.dims)).copy()
    change(values)
    data[start : start + length] = values.tobytes()
    if said:
        (small.onnx / DATA).write_bytes(bytes(data))
    else:
        tensor.raw_data = bytes(data)
        (small.onnx / "model.onnx").write_bytes(model.SerializeToString())


def external(model: Any, key: str, value: str, name: str = "model.embed_tokens.weight") -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            for entry in tensor.external_data:
                if entry.key == key:
                    entry.value = value


def test_what_was_written_passes_and_stays_as_it_is(good: Small) -> None:
    before = {path.name: path.read_bytes() for path in good.onnx.iterdir() if path.is_file()}
    checks = good.check()
    assert list(checks) == SOUND
    assert all(check.ok for check in checks.values()), checks
    error = checks["reload.onnxruntime"].value
    assert isinstance(error, float)
    assert 0 < error < 1e-5
    assert checks["reload.onnxruntime"].limit == 1e-4
    assert {path.name: path.read_bytes() for path in good.onnx.iterdir() if path.is_file()} == before


def flip(values: Any) -> None:
    values[5, 1, 3] ^= 0x80  # the highest bit of one code: the weight moves by half its range


def shift(values: Any) -> None:
    values.reshape(-1)[7] += 1  # a zero point by one: 32 weights move by one step


def swap(values: Any) -> None:
    values[[2, 3]] = values[[3, 2]]


def roll(values: Any) -> None:
    values[:] = np.roll(values, 1, axis=0)


def scale_by(factor: float) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        values *= factor

    return change


WRONG: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a flipped bit of a code": ("attention.1/qkv.codes", flip),
    "a shifted zero point": ("model.layers.2.mlp.down_proj.zeros", shift),
    "swapped scales": ("model.layers.0.mlp/merged.scales", swap),
    "a norm by a thousandth": ("model.norm.weight", scale_by(1.001)),
    "angles by a thousandth": ("rotary.0.sin", scale_by(1.001)),
    "embeddings of other tokens": ("model.embed_tokens.weight", roll),
    "not a number": ("model.layers.1.mlp/merged.scales", scale_by(float("nan"))),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_is_found(small: Small, name: str, change: Callable[[Any], None]) -> None:
    spoil(small, name, change)
    checks = small.check()
    assert checks["onnx.valid"].ok
    assert not checks["reload.onnxruntime"].ok
    if checks["reload.onnxruntime"].value is None:
        assert "not finite" in checks["reload.onnxruntime"].where


def other_attribute(kind: str, name: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == kind and attribute.name == name:
                    if attribute.type == onnx.AttributeProto.FLOAT:
                        attribute.f = value
                    else:
                        attribute.i = int(value)

    return change


def blind_mask(model: Any) -> None:
    """Padding is seen: the mask's bias is multiplied by nothing."""
    for tensor in model.graph.initializer:
        if tensor.name == "mask/value":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "mask/value"))


def same_cache(model: Any) -> None:
    """Layer 1 looks at the past of layer 0."""
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name.startswith("past_key_values.1."):
                node.input[place] = name.replace(".1.", ".0.")


GRAPHS: dict[str, tuple[Callable[[Any], None], str]] = {
    "no mask": (blind_mask, "padded row"),
    "another layer's cache": (same_cache, "steps"),
    "another scale of attention": (other_attribute("GroupQueryAttention", "scale", 0.26), ""),
    "no rotation": (other_attribute("GroupQueryAttention", "do_rotary", 0), ""),
    "another epsilon": (other_attribute("SkipSimplifiedLayerNormalization", "epsilon", 1e-2), ""),
}


@pytest.mark.parametrize(("change", "where"), GRAPHS.values(), ids=GRAPHS)
def test_a_wrong_graph_is_found(small: Small, change: Callable[[Any], None], where: str) -> None:
    edit(small, change)
    found = small.check()["reload.onnxruntime"]
    assert not found.ok
    assert where in found.where


def test_int8_rounding_of_activations_is_not_taken_for_a_fault(good: Small) -> None:
    """The file says level 4, the check computes at 0: 1e-4 would not hold otherwise, and a fault could hide in it."""
    from quantkit.runtimes.onnxruntime.session import OnnxModel

    levels = {
        attribute.i
        for node in good.proto().graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    }
    assert levels == {4}
    ids = np.arange(3, 15)[None]
    four, none = (OnnxModel(good.onnx, threads=1, accuracy_level=level) for level in (None, 0))
    rounded, exact = (each.run(each.state(1, 12), ids) for each in (four, none))
    assert np.abs(rounded - exact).max() / np.abs(exact).max() > 1e-4


def test_one_nan_among_good_runs_is_not_lost() -> None:
    nan = float("nan")
    assert largest({"prompt": 1e-7, "steps": 3e-7, "padded row": 2e-7}) == (3e-7, "steps")
    for runs in ({"prompt": 1e-7, "steps": nan}, {"prompt": nan, "steps": 1e-7}, {"a": 1.0, "steps": nan, "b": 2.0}):
        value, where = largest(runs)
        assert value is None
        assert "not finite" in where


# --- the files --------------------------------------------------------------------------------------------------------


def outside(small: Small, place: str) -> None:
    edit(small, lambda model: external(model, "location", place))


def moved(small: Small) -> None:
    (small.onnx / "elsewhere").mkdir()
    shutil.move(small.onnx / DATA, small.onnx / "elsewhere" / DATA)
    edit(
        small, lambda model: [external(model, "location", f"elsewhere/{DATA}", t.name) for t in model.graph.initializer]
    )


def linked(small: Small) -> None:
    shutil.move(small.onnx / DATA, small.folder / DATA)
    (small.onnx / DATA).symlink_to(small.folder / DATA)


def lying_at(place: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="hidden", data_type=onnx.TensorProto.UINT8, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    return tensor


def first(model: Any, kind: str, inputs: list[str], **attributes: Any) -> None:
    model.graph.node.insert(0, onnx.helper.make_node(kind, inputs, ["chosen"], **attributes))


def branching(model: Any, nodes: list[Any], tensors: list[Any], kind: int) -> None:
    """Let the graph begin with an If whose branches hold these."""
    output = onnx.helper.make_tensor_value_info("hidden", kind, [4])
    branch = onnx.helper.make_graph(nodes, "branch", [], [output], tensors)
    first(model, "If", ["one"], then_branch=branch, else_branch=branch)


def in_an_attribute(small: Small) -> None:
    """A Constant node's tensor can lie outside too."""
    edit(small, lambda model: first(model, "Constant", [], value=lying_at("../../secret")))


def in_a_subgraph(small: Small) -> None:
    edit(small, lambda model: branching(model, [], [lying_at("/etc/passwd")], onnx.TensorProto.UINT8))


OUTSIDE: dict[str, tuple[Callable[[Small], None], str]] = {
    "above": (lambda small: outside(small, "../secret"), "../secret"),
    "absolute": (lambda small: outside(small, "/etc/passwd"), "/etc/passwd"),
    "below": (moved, f"elsewhere/{DATA}"),
    "through the folder": (lambda small: outside(small, f"../onnx/{DATA}"), f"../onnx/{DATA}"),
    "missing": (lambda small: (small.onnx / DATA).unlink(), DATA),  # type: ignore[func-returns-value]
    "a link": (linked, DATA),
    "in an attribute": (in_an_attribute, "../../secret"),
    "in a subgraph": (in_a_subgraph, "/etc/passwd"),
}


@pytest.mark.parametrize(("change", "where"), OUTSIDE.values(), ids=OUTSIDE)
def test_data_that_is_not_a_file_of_the_folder_is_never_opened(
    small: Small, change: Callable[[Small], None], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(small)
    monkeypatch.setattr(onnx.checker, "check_model", lambda *_: pytest.fail("the checker opens the files"))
    monkeypatch.setattr(check_onnx, "OnnxModel", lambda *_, **__: pytest.fail("the runtime opens the files"))
    checks = small.check()
    assert list(checks) == ["onnx.contained", "onnx.operators"]
    assert not checks["onnx.contained"].ok
    assert where in checks["onnx.contained"].where


def of_domain(place: int, domain: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.graph.node[place], "domain", domain)


def inside(model: Any) -> None:
    node = onnx.helper.make_node("Custom", [], ["hidden"], domain="com.example")
    branching(model, [node], [], onnx.TensorProto.FLOAT)


def function(model: Any) -> None:
    body = [onnx.helper.make_node("Identity", ["a"], ["b"])]
    imports = [onnx.helper.make_opsetid("", 23)]
    model.functions.append(onnx.helper.make_function("com.microsoft", "MatMulNBits", ["a"], ["b"], body, imports))


FOREIGN: dict[str, tuple[Callable[[Any], None], str]] = {
    "foreign": (of_domain(-1, "com.example"), "com.example"),
    "a placeholder": (of_domain(3, "quantkit"), "quantkit"),
    "in a subgraph": (inside, "com.example"),
    "a function": (function, "com.microsoft::MatMulNBits"),
}


@pytest.mark.parametrize(("change", "named"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_operators_are_found_wherever_they_stand(
    small: Small, change: Callable[[Any], None], named: str
) -> None:
    edit(small, change)
    checks = small.check()
    assert not checks["onnx.operators"].ok
    assert named in checks["onnx.operators"].where
    assert "reload.onnxruntime" not in checks


def halve(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


UNSOUND: dict[str, Callable[[Small], Any]] = {
    "no graph": lambda small: (small.onnx / "model.onnx").unlink(),
    "an empty graph": lambda small: (small.onnx / "model.onnx").write_bytes(b""),
    "half a graph": lambda small: halve(small.onnx / "model.onnx", 500),
    "another file": lambda small: (small.onnx / "model.onnx").write_bytes(b"version https://git-lfs.github.com"),
    "half the data": lambda small: halve(small.onnx / DATA, (small.onnx / DATA).stat().st_size // 2),
    "an input that nothing makes": lambda small: edit(
        small, lambda model: model.graph.node[-1].input.__setitem__(0, "nothing")
    ),
    "data beyond the end": lambda small: edit(small, lambda model: external(model, "offset", str(1 << 40))),
    "an operator that refuses its inputs": lambda small: edit(
        small, other_attribute("GroupQueryAttention", "kv_num_heads", 4)
    ),
}


@pytest.mark.parametrize("change", UNSOUND.values(), ids=UNSOUND)
def test_a_broken_file_fails_a_check_and_raises_nothing(small: Small, change: Callable[[Small], Any]) -> None:
    change(small)
    checks = small.check()
    failed = [check for check in checks.values() if not check.ok]
    assert failed
    assert all(check.where for check in failed)
    reloaded = checks.get("reload.onnxruntime")
    assert reloaded is None or (reloaded.ok, reloaded.value) == (False, None)


def test_an_encoder_s_faults_are_found_too(tmp_path: Path) -> None:
    small = export(tmp_path, "bert", scheme(), changes={"num_hidden_layers": 1})
    assert all(check.ok for check in small.check().values())
    name = next(each.name for each in small.proto().graph.initializer if each.name.endswith("merged.codes"))
    spoil(small, name, flip)
    assert not small.check()["reload.onnxruntime"].ok

    small = kept(export(tmp_path / "other", "bert", changes={"num_hidden_layers": 1}), tmp_path / "masked")

    def unmasked(model: Any) -> None:
        for node in model.graph.node:
            if node.op_type == "MultiHeadAttention":
                node.input[4] = ""

    edit(small, unmasked)
    found = small.check()["reload.onnxruntime"]
    assert not found.ok
    assert found.where == "padded row"


def test_without_a_model_to_compare_with_the_file_is_checked_alone(good: Small) -> None:
    checks = EXPORT.check(good.folder)
    assert [check.name for check in checks] == SOUND[:3]
    assert all(check.ok for check in checks)
