"""Graphs with a table in codes, a head of more bits for some rows, and two ways to multiply, timed to choose one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo
from onnx import numpy_helper

from quantkit import machine
from quantkit.bundle import LayerEntry
from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
from quantkit.exporters import LayerSpec
from quantkit.exporters.onnx import trial
from quantkit.exporters.onnx.check import check
from quantkit.exporters.onnx.exporter import EXPORT
from quantkit.exporters.onnx.integers import ROWS
from quantkit.exporters.values import Values
from quantkit.measurement.accuracy import score
from quantkit.measurement.size import read_rows
from quantkit.measurement.timing.speed import compared
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.passes.assign import nearest
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.scheme import WeightScheme
from quantkit.stats.abba import Comparison, compare
from quantkit.target import Target

VNNI = any("vnni" in name for name in machine.isa_features())
SCHEME = WeightScheme(format="int4", granularity="group", group=32, symmetric=False)
CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}
Exported = Callable[..., tuple[Path, Values, list[str]]]


def linears(stream: StreamedModel) -> list[str]:
    return [name.removesuffix(".weight") for name in stream.files if name.endswith(("_proj.weight", "lm_head.weight"))]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """A tiny model with linears rounded to nearest, as a graph: its bundle, the values and the decisions' codes."""

    def export(name: str, *, head: bool = True, codes: bool = True, **options: Any) -> tuple[Path, Values, list[str]]:
        zoo.tiny(name, **CHANGES).save_pretrained(tmp_path / name)  # type: ignore[operator]
        stream = StreamedModel(open_model(str(tmp_path / name)))
        names = [each for each in linears(stream) if codes and (head or each != "lm_head")]
        found = {each: nearest(stream.tensor(f"{each}.weight"), SCHEME) for each in names}
        finished.save(tmp_path / f"{name}.codes", found, {})
        results = Finished([tmp_path / f"{name}.codes"], dict.fromkeys(found, SCHEME))
        values = Values.of_results(stream.source, stream, results)
        bundle = tmp_path / "-".join([name, *map(str, options.values())])
        taken = EXPORT.export(bundle / "onnx", values, EXPORT.Options(**options))
        for each in check(bundle / "onnx", values):
            assert each.ok, each
        return bundle, values, [each.code for each in taken]

    return export


def embedded(bundle: Path) -> np.ndarray:
    """What the graph looks up for every id, by ONNX Runtime."""
    model = onnx.load(str(bundle / "onnx" / "model.onnx"), load_external_data=False)
    names = {name for node in model.graph.node for name in node.output}
    name = next(each for each in ("embedding/sum", "embedding/head", "embedding/own") if each in names)
    running = OnnxModel(bundle / "onnx", threads=1, shown=[name])
    ids = np.arange(60)[None]
    return np.asarray(running.session.run([name], running.prompt(ids))[0])[0]


def test_a_tied_table_is_read_from_the_heads_codes_and_two_bits_more(exported: Exported) -> None:
    sizes, errors = {}, {}
    for storage in ("float", "int8", "shared", "refined"):
        bundle, values, taken = exported("llama-tied", embedding=storage)
        assert not taken
        sizes[storage] = (bundle / "onnx" / "model.onnx.data").stat().st_size
        if storage != "float":
            exact = values.tensor("model.embed_tokens.weight").numpy()[:60]
            errors[storage] = float(np.square(embedded(bundle) - exact).sum() / np.square(exact).sum())
    assert sizes["shared"] < sizes["refined"] < sizes["int8"] < sizes["float"]
    # half a step of 4 bits, what two bits leave of it, and of 8 bits
    assert 2e-3 < errors["shared"] < 2e-2
    assert errors["refined"] < errors["shared"] / 4
    assert errors["int8"] < 1e-4


def test_what_a_table_cannot_be_read_from_is_said(exported: Exported) -> None:
    assert exported("llama", embedding="refined")[2] == ["embedding-own"]  # a head of its own: 8 bits
    assert exported("llama-tied", head=False, embedding="shared")[2] == ["embedding-float"]


def test_first_rows_of_a_head_have_more_bits(exported: Exported) -> None:
    rows = 40
    bundle, values, _ = exported("llama-tied", head_rows=rows)
    running = OnnxModel(bundle / "onnx", threads=1, accuracy_level=0)
    ids = np.arange(3, 15)[None]
    found = torch.from_numpy(np.asarray(running.run(running.state(1, 12), ids)[0]))
    with torch.no_grad():
        x = torch.stack([values.stream.answers(torch.from_numpy(ids)).given("lm_head", 0)])[0]
    weight = values.before("lm_head.weight")  # type: ignore[misc]
    error = (found - x @ weight.T).square().mean(0)
    assert float(error[:rows].mean()) < float(error[rows:].mean()) / 50


def test_many_rows_multiply_in_integers_and_few_as_before(exported: Exported) -> None:
    plain, _, _ = exported("llama", embedding="float")
    bundle, _, _ = exported("llama", prefill="int8")
    one, both = OnnxModel(plain / "onnx", threads=1), OnnxModel(bundle / "onnx", threads=1)
    ids = np.random.default_rng(0).integers(3, 90, (1, 2 * ROWS))

    def logits(model: OnnxModel, step: int) -> np.ndarray:
        state = model.state(1, ids.shape[1])
        parts = [model.run(state, ids[:, at : at + step]).copy() for at in range(0, ids.shape[1], step)]
        return np.concatenate(parts, axis=1)

    few = logits(one, ROWS // 2)
    assert np.array_equal(logits(both, ROWS // 2), few)
    many = logits(both, ROWS)
    off = float(np.linalg.norm(many - few) / np.linalg.norm(few))
    # another way, of the same weights; without VNNI sums of pairs saturate
    assert 1e-4 < off < (0.1 if VNNI else 1)


def test_both_ways_are_scored_each_by_itself(exported: Exported, tmp_path: Path) -> None:
    plain, values, _ = exported("llama", embedding="float")
    bundle, _, _ = exported("llama", prefill="int8")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 90, (2, 2 * ROWS + 1)))
    tokens = TokenSet(ids, "random", "eval", ids_sha256(ids.numpy()))
    original = StreamedModel(open_model(str(tmp_path / "llama")))

    def scored(folder: Path) -> dict[str | None, float]:
        rows, _ = score.rows(original, OnnxModel(folder / "onnx"), tokens, subject="x", runtime="onnxruntime")
        return {row.settings.get("way"): row.value for row in rows if row.name == "accuracy.kl"}  # type: ignore[misc]

    one, both = scored(plain), scored(bundle)
    assert [*both] == ["prompts", "steps"]
    assert both["steps"] == pytest.approx(one[None], rel=1e-6)
    assert abs(both["prompts"] / both["steps"] - 1) > 1e-4
    running = OnnxModel(bundle / "onnx")
    read = {row.settings["way"]: row.value for row in read_rows(running.ways, subject="x", folder="onnx")}
    shapes = [each.shape for name, each in values.skeleton.named_parameters() if "_proj" in name]
    # a byte a weight and a scale a row, instead of half a byte with a scale and a zero point for each 32
    more = sum(rows * columns * (1 - 1 / 2 - 4.5 / 32) + 4 * rows for rows, columns in shapes)
    assert read["prompts"] - read["steps"] == pytest.approx(more, rel=0.05)  # type: ignore[operator]
    assert running.prompt_rows == ROWS


def test_an_accuracy_level_reaches_both_ways(exported: Exported) -> None:
    bundle, _, _ = exported("llama", prefill="int8")
    ids = np.random.default_rng(0).integers(3, 90, (1, 4))
    found = {}
    for level in (None, 0, 1):
        model = OnnxModel(bundle / "onnx", threads=1, accuracy_level=level)
        found[level] = model.run(model.state(1, 4), ids)
    assert np.allclose(found[1], found[0], atol=1e-5)
    assert not np.allclose(found[None], found[0], atol=1e-5)


def other_bytes(model: Any) -> None:
    tensor = next(each for each in model.graph.initializer if each.name.endswith(".bytes"))
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] ^= 16
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def other_caches(model: Any) -> None:
    """Of prompts, handed on in the wrong order."""
    node = next(each for each in model.graph.node if each.op_type == "If")
    branch = next(each.g for each in node.attribute if each.name == "else_branch")
    attention = next(each for each in branch.node if each.op_type == "GroupQueryAttention")
    attention.output[1], attention.output[2] = attention.output[2], attention.output[1]


@pytest.mark.parametrize(("change", "failing"), [(other_bytes, ["onnx.bytes"]), (other_caches, ["reload.many"])])
def test_what_is_wrong_for_prompts_alone_is_found(exported: Exported, change: Any, failing: list[str]) -> None:
    bundle, values, _ = exported("llama", prefill="int8")
    path = bundle / "onnx" / "model.onnx"
    model = onnx.load(str(path))
    change(model)
    onnx.save_model(model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    assert [each.name for each in check(bundle / "onnx", values) if not each.ok] == failing


def test_what_has_no_second_way_says_so(exported: Exported) -> None:
    assert exported("llama", head=False, codes=False, prefill="int8")[2] == ["prefill-same"]


def x86_with(*isa: str) -> Target:
    target = Target.load("cpu-x86")
    return target.model_copy(update={"arch": target.arch.model_copy(update={"isa": [*isa]})})


@pytest.mark.parametrize(
    ("isa", "way"), [(["avx512_vnni", "avx2"], "int8"), (["avx2"], "same"), (["neon_i8mm"], "int8")]
)
def test_how_prompts_multiply_follows_the_target(isa: list[str], way: str) -> None:
    options, told = EXPORT.for_target(EXPORT.Options(prefill="auto"), x86_with(*isa), LayerSpec())
    assert options["prefill"] == way
    assert told.endswith("and was not timed")
    assert EXPORT.for_target(EXPORT.Options(prefill="same"), x86_with(*isa), LayerSpec()) == ({}, "")


@pytest.mark.parametrize(
    ("form", "group", "level", "expanded"),
    [
        *(("int2", 32, 4, 0), ("int2", None, 4, 0), ("int2", 16, 4, 1), ("int2", 48, 4, 1), ("int2", 32, 0, 1)),
        *(("int4", 16, 0, 0), ("int8", 16, 4, 0), ("int8", None, 0, 1)),
    ],
)
def test_products_without_a_kernel_are_told_before_the_work(
    form: str, group: int | None, level: int, expanded: int
) -> None:
    how = WeightScheme(format=form, granularity="channel" if group is None else "group", group=group)
    changes, told = EXPORT.for_target(EXPORT.Options(accuracy_level=level), x86_with(), LayerSpec({"a.b": how}))
    assert changes == {}
    assert ("it expands a.b" in told) == (told != "") == bool(expanded)


@pytest.mark.parametrize(
    ("options", "isa", "form", "activations", "offer"),
    [
        ({}, "avx512_vnni", "int4", None, "onnx.prefill=int8"),
        ({}, "avx2", "int4", None, ""),
        ({"prefill": "int8"}, "avx512_vnni", "int4", None, ""),
        ({}, "avx512_vnni", "int2", None, ""),
        ({}, "avx512_vnni", "int8", {"format": "int8"}, ""),
    ],
)
def test_faster_prompts_are_offered_where_the_target_and_the_codes_have_them(
    options: dict[str, Any], isa: str, form: str, activations: Any, offer: str
) -> None:
    layer = LayerEntry(name="x", shape=[8, 8], scheme={"format": form}, bits_per_weight=4.0, activations=activations)
    assert EXPORT.for_prompts(EXPORT.Options(**options), x86_with(isa), [layer]) == offer


SHAPES = {"q_proj": (64, 96), "up_proj": (128, 96), "down_proj": (96, 128)}
ASKED = LayerSpec(
    schemes=dict.fromkeys([*(f"layers.{block}.{name}" for block in (0, 1) for name in SHAPES), "head"], SCHEME),
    shapes={f"layers.{block}.{name}": shape for block in (0, 1) for name, shape in SHAPES.items()},
)


def test_both_ways_are_the_products_of_one_block() -> None:
    linears = trial.block_of(ASKED)
    assert [*linears] == [f"layers.0.{name}" for name in SHAPES]
    given = trial.feeds(linears, 40)
    assert {name: value.shape for name, value in given.items()} == {"x.96": (1, 40, 96), "x.128": (1, 40, 128)}
    found = {}
    for way, model in trial.graphs(linears, 4).items():
        kinds = {node.op_type for node in onnx.load_model_from_string(model).graph.node}
        assert ("MatMulNBits" in kinds, "MatMulIntegerToFloat" in kinds) == (way == "steps", way == "prompts")
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        found[way] = dict(zip([each.name for each in session.get_outputs()], session.run(None, given), strict=True))
    for name, expected in found["steps"].items():
        apart = np.linalg.norm(found["prompts"][name] - expected) / np.linalg.norm(expected)
        # without VNNI sums of pairs saturate
        assert 1e-4 < apart < (0.03 if VNNI else 1)


def test_a_block_without_codes_has_no_trial() -> None:
    floats = LayerSpec(schemes={"layers.0.x": WeightScheme(format="nf4", granularity="group", group=64)})
    assert trial.block_of(floats) == {}


def timed(ratio: float) -> Comparison:
    times = np.full((8, 2, 2), 1.0) + np.random.default_rng(0).normal(0, 1e-3, (8, 2, 2))
    return compare(times / ratio, times)


@pytest.mark.parametrize(("ratio", "way"), [(2.0, "int8"), (0.8, "same")])
def test_a_timing_decides_on_the_machine_at_hand(ratio: float, way: str) -> None:

    def stopped(subject: bytes, baseline: bytes, feeds: Mapping[str, Any]) -> Comparison:
        assert b"MatMulIntegerToFloat" in subject
        assert b"MatMulNBits" in baseline
        return timed(ratio)

    options, said = EXPORT.for_target(EXPORT.Options(prefill="auto"), x86_with("avx512_vnni"), ASKED, stopped)
    assert options["prefill"] == way
    assert f"{ratio:.2f} times as fast" in said


def test_the_smaller_of_two_graphs_is_faster() -> None:
    sizes = {}
    for rows in (64, 1024):
        linears = trial.block_of(LayerSpec(schemes={"layers.0.x": SCHEME}, shapes={"layers.0.x": (rows, 256)}))
        sizes[rows] = trial.graphs(linears, 0)["steps"], trial.feeds(linears, 64)
    found = compared(sizes[64][0], sizes[1024][0], sizes[64][1], 1, seconds=0.2)
    assert found.ratio_ci95[0] > 1
