"""Sentence encoders from a model to a verdict's rows: pairs calibrate and score, and a CPU multiplies in integers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit.bundle import Bundle
from quantkit.calibrate.sets.pairs import PairSet, load_pairs
from quantkit.errors import InputError
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.measure import measure_bundle

pytestmark = pytest.mark.usefixtures("own_cache")

CHANGES = {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 64}
FEW = ["calibration.samples=2", "calibration.tokens=32"]
SCORED = [*(f"accuracy.{name}" for name in ("recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "cosine"))]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("source") / "bert"
    return zoo.save(folder, byte_tokenizer, "bert", **CHANGES)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"n{n}\tsaid {n * n} by\tby {n * n} said\n" for n in range(140)))
    return path


def test_int8_on_a_cpu_is_a_graph_of_integers_scored_on_pairs(encoder: Path, pairs: Path, tmp_path: Path) -> None:
    gates = ["gates={recall_drop_max: 100, cosine_min: 0.5}"]
    request = Request.of(
        str(encoder),
        recipe="int8",
        target="cpu-x86",
        calibration=pairs,
        out=tmp_path / "out",
        changes=[*FEW, *gates],
        speed=False,
    )
    result = compile_model(request)
    manifest = result.bundle.manifest
    assert [next(iter(step)) for step in manifest.recipe["export"]] == ["onnx", "checkpoint"]
    checks = {check.name: check for check in manifest.checks}
    assert checks["integer.macs"].value == 1
    assert {"gate.recall_drop_max", "gate.torch.recall_drop_max", "gate.cosine_min"} <= set(checks)
    rows = [row for row in result.rows if row.name.startswith("accuracy.")]
    assert [row.name for row in rows] == [*SCORED, *SCORED]
    assert {row.runtime for row in rows} == {"onnxruntime", "torch"}
    for row in rows:
        assert row.data is not None
        assert (row.data.set, row.data.split, row.data.items) == ("pairs.tsv", "eval", 14)
    assert manifest.calibration is not None
    assert manifest.calibration.set == "pairs.tsv"


def test_a_bundle_measured_again_has_the_same_rows(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*args: Any, **settings: Any) -> PairSet:
        whole = load_pairs(*args, **settings)
        return replace(whole, left=whole.left[:24], right=whole.right[:24])

    monkeypatch.setattr("quantkit.calibrate.tokens.ids.load_pairs", few)
    changes = [*FEW, "gates={}", "calibration.set=verse-pairs", "export=[{checkpoint: {layout: int-quantized}}]"]
    result = compile_model(
        Request.of(str(encoder), recipe="int8", target="cpu-x86", changes=changes, out=tmp_path / "out", speed=False)
    )
    assert not (result.bundle.path / "onnx").exists()  # `--set export` says what is exported
    again = measure_bundle(Bundle.load(result.bundle.path), str(encoder), runtime="torch", speed=False)
    found = [[(row.name, row.value, row.data) for row in rows if row.name in SCORED] for rows in (result.rows, again)]
    assert found[0] == found[1]
    assert [name for name, _, _ in found[0]] == SCORED


def test_a_shipped_encoder_has_a_set_of_its_own_and_a_decoder_reads_no_pairs(tmp_path: Path) -> None:
    def chosen(*changes: str, **asked: Any) -> str:
        return Request.of("minilm-l6", recipe="int8", changes=changes, **asked).recipe.calibration.set

    assert chosen() == "verse-pairs"
    assert chosen(calibration="prose-en") == chosen("calibration.set=prose-en") == "prose-en"
    assert Request.of("smollm2-135m", recipe="int8").recipe.calibration.set == "prose-en"
    own = tmp_path / "own.yaml"
    own.write_text("summary: mine\nmodels: [encoder]\n")
    assert Request.of("minilm-l6", recipe=str(own)).recipe.calibration.set == "prose-en"
    folder = tmp_path / "llama"
    zoo.tiny("llama").save_pretrained(folder)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"tokenizer|the set holds pairs"):
        compile_model(Request.of(str(folder), recipe="int8", calibration="verse-pairs", out=tmp_path / "no"))


def test_floats_do_not_fuse_and_are_refused(encoder: Path, tmp_path: Path) -> None:
    fp8 = ["export=[{onnx: {}}]", *FEW]
    with pytest.raises(InputError, match="fp8_e4m3 inputs do not run in onnxruntime"):
        compile_model(Request.of(str(encoder), recipe="fp8", changes=fp8, out=tmp_path / "no", speed=False))
