"""The page of the Python API: every example runs as it stands, and every name is on it."""

import re
from pathlib import Path
from typing import Any

import pytest
import zoo

import quantkit
from quantkit import content
from quantkit.pipeline.blocks import tokens
from quantkit.tuning import search

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_every_public_name() -> None:
    missing = [name for name in quantkit.__all__ if f"`{name}`" not in PAGE and name != "plan_model"]
    assert not missing


@pytest.mark.parametrize("name", ["compile", "load", "measure", "compare", "plan", "tune", "export"])
def test_a_verb_is_a_function_whatever_was_imported(name: str) -> None:
    import quantkit.exporters
    import quantkit.measurement
    import quantkit.planning
    import quantkit.tuning

    assert type(getattr(quantkit, name)).__name__ == "function"


@pytest.fixture
def place(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 128}
    zoo.save(tmp_path / "my-model", byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), **sizes)
    prose = content.find("calibration", "prose-en").parent / "tune.txt"
    (tmp_path / "my-text.txt").write_text(prose.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokens, "SCORED", 300)
    monkeypatch.setattr(search, "CHECKED", 300)
    return tmp_path


def test_the_examples_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"token_ids": zoo.ids()}
    model, hashes = zoo.tiny("llama"), list[str]()
    for example in EXAMPLES:
        if "pipeline.apply" in example:
            space["model"] = model
        exec(example, space)
        hashes.append(space["bundle"].manifest.content_sha256)
    said = capsys.readouterr().out
    assert hashes[0] in said and hashes[0] != hashes[-1], "the second export is part of the content"
    assert (place / "small" / "onnx" / "model.onnx").is_file()
    assert space["kl"] == pytest.approx(
        next(row["value"] for row in space["rows"] if row["name"] == "accuracy.kl"), abs=1e-6
    )
    assert space["found"].exit in (0, 1, 3) and space["other"].manifest.recipe["name"] == "plain"
    kl = [row["value"] for row in space["other"].measurements if row["name"] == "accuracy.kl"]
    assert space["other"].frame("pyarrow").column("value").to_pylist().count(kl[0]) == 1
    assert "Plotly.newPlot" in (place / "weights.html").read_text(encoding="utf-8")
    assert space["tuned"].front["chosen"]["bits"] <= 5
    assert [step.name for step in space["own"].passes] == ["rtn"]
    assert "unknown-recipe" in said and "awq-int4" in said
    assert space["pipeline"].tensors
    assert len(str(space["bundle"]).splitlines()) == 2 and "\ncomplete; speed not measured\n" in said
    assert len(space["text"]) == 4, "the tokenizer has one token a byte"
    assert repr(space["bundle"]) == "Bundle('small')"
