"""Graphs whose embeddings are in codes, whose head has more bits for some rows, and that multiply in two ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import small_onnx
import torch
import zoo
from onnx import numpy_helper

from quantkit import machine
from quantkit.bundle import LayerEntry
from quantkit.calibrate.tokens.ids import TokenSet, ids_sha256
from quantkit.exporters import LayerSpec
from quantkit.exporters.onnx.check import check
from quantkit.exporters.onnx.exporter import EXPORT
from quantkit.exporters.onnx.integers import ROWS
from quantkit.exporters.values import Values
from quantkit.measurement.accuracy import score
from quantkit.measurement.size import read_rows
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.passes.assign import nearest
from quantkit.runtimes.onnxruntime.session import OnnxModel
from quantkit.scheme import WeightScheme
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
        with small_onnx.traced_once(name, CHANGES):
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


def test_bytes_that_are_not_the_codes_are_found(exported: Exported) -> None:
    bundle, values, _ = exported("llama", prefill="int8")
    path = bundle / "onnx" / "model.onnx"
    model = onnx.load(str(path))
    tensor = next(each for each in model.graph.initializer if each.name.endswith(".bytes"))
    array = numpy_helper.to_array(tensor).copy()
    array[0, 0] ^= 16
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save_model(model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    wrong = [each.name for each in check(bundle / "onnx", values) if not each.ok]
    assert wrong == ["onnx.bytes"]


def test_caches_that_prompts_hand_on_are_held_too(exported: Exported, tmp_path: Path) -> None:
    bundle, values, _ = exported("llama", prefill="int8")
    path = bundle / "onnx" / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    node = next(each for each in model.graph.node if each.op_type == "If")
    branch = next(each.g for each in node.attribute if each.name == "else_branch")
    attention = next(each for each in branch.node if each.op_type == "GroupQueryAttention")
    attention.output[1], attention.output[2] = attention.output[2], attention.output[1]
    path.write_bytes(model.SerializeToString())
    assert "reload.many" in [each.name for each in check(bundle / "onnx", values) if not each.ok]


def test_what_has_no_second_way_says_so(exported: Exported) -> None:
    assert exported("llama", head=False, codes=False, prefill="int8")[2] == ["prefill-same"]


@pytest.mark.parametrize(
    ("isa", "way"), [(["avx512_vnni", "avx2"], "int8"), (["avx2"], "same"), (["neon_i8mm"], "int8")]
)
def test_how_prompts_multiply_follows_the_target(isa: list[str], way: str) -> None:
    target = Target.load("cpu-x86")
    target = target.model_copy(update={"arch": target.arch.model_copy(update={"isa": isa})})
    options, said = EXPORT.for_target(EXPORT.Options(prefill="auto"), target, LayerSpec())
    assert options["prefill"] == way
    assert said.endswith("and was not timed")
    assert EXPORT.for_target(EXPORT.Options(prefill="same"), target, LayerSpec()) == ({}, "")


def test_faster_prompts_are_offered_where_the_target_and_the_codes_have_them() -> None:
    target = Target.load("cpu-x86")
    fast, slow = (
        target.model_copy(update={"arch": target.arch.model_copy(update={"isa": isa})})
        for isa in (["avx512_vnni"], ["avx2"])
    )

    def layers(form: str, **more: Any) -> list[LayerEntry]:
        return [LayerEntry(name="x", shape=[8, 8], scheme={"format": form}, bits_per_weight=4.0, **more)]

    assert EXPORT.for_prompts(EXPORT.Options(), fast, layers("int4")) == "onnx.prefill=int8"
    assert EXPORT.for_prompts(EXPORT.Options(), slow, layers("int4")) == ""
    assert EXPORT.for_prompts(EXPORT.Options(prefill="int8"), fast, layers("int4")) == ""
    assert EXPORT.for_prompts(EXPORT.Options(), fast, layers("int2")) == ""
    assert EXPORT.for_prompts(EXPORT.Options(), fast, layers("int8", activations={"format": "int8"})) == ""
